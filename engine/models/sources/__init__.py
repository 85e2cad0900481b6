"""Where models come from. Each source plans, fetches, finds and removes; see `base`."""
