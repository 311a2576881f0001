"""warmslot.launcher: starts, watches and measures llama-server backends."""
