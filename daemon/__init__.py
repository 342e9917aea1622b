"""The fusewire daemon: shards in by folder and socket, readiness events out.

Nothing is imported here: `fusewire.daemon.client` must load on a host that has no torch.
"""
