"""Decoding behind an encoded context without waste.

    cache = method.encode(model, context, budget=1024)
    with method.attach(model):
        batch = QueryBatch(model, cache, [query])          # kvexp.tasks.batch
        [answer], [why] = batch.generate(256, stopped, compiled=True)

`stopped(new ids)` names a reason to end, or returns None. The loop forks the cache: the context's rows are
read where they are, and new ones are written in the room behind them. With `compiled` (or
`Options(compiled=True)` for all that a model makes) everything between two attentions is one graph
(`kvexp.decode.compiled`). It takes a minute or more to compile, once for a model and process.
"""
