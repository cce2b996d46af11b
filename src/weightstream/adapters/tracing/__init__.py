"""Forward passes that run on meta tensors or are timed, to learn shapes and costs."""
