"""Machine descriptions and run settings in YAML, shipped as package data."""
