"""Methods that let rows leave the cache, when the prompt has been read or while decoding."""
