"""A machine's links on one Linux host: a network namespace for every tile, a rate-limited veth pair for every link."""
