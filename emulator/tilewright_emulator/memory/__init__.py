"""Device memory and LDS, with marks of who touched what."""
