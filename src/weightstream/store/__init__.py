"""Home tiers: where the bytes of a weight live while they are not on the device."""
