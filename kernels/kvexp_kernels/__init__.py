"""Operations that kvexp needs inside attention, one folder each.

`reference.py` is the readable definition in plain torch; faster twins stand beside it where they pay.
Nothing here imports kvexp, so that a kernel can be read, tested and reused alone.
"""
