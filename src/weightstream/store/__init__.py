"""Files and host memory: where the bytes of a weight are while they are not on the device."""
