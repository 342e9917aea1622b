"""Where shards come from: the drop folder and the ingest socket. Each file owns one foreign library."""
