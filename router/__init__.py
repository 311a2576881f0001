"""warmslot.router: a cache-aware HTTP router in front of llama-server backends."""
