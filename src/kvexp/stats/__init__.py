"""Streaming statistics over more samples than fit in memory: plain torch and FAISS, no model code."""
