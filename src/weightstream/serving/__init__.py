"""The OpenAI API over HTTP: requests, their turns at the model, and replies."""
