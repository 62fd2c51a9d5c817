"""Cache layers and the cache made of them."""
