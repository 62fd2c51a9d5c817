"""What decoding, prefill, scores and lookups cost, beside what a user would take instead.

    python -m kvexp.bench PART [key=value ...]      # --help lists the parts

Sides take turns in one process after a warm-up, so that a ratio is of times under the same load.
"""
