"""The whole job on a tiny real checkpoint: what `fusewire demo` and `make demo` run."""
