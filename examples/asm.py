"""Attention-state memory in a plain transformers script: a prefix becomes 256 entries, then generate as usual."""

import torch

import kvexp

loaded = kvexp.load("smollm2-135m")
model, encode = loaded.model, loaded.tokenizer.encode
prefix = encode("".join(f"Query: take {n} to room {n + 7}\nIntent: delivery\n" for n in range(60)))
traces = [encode(f"Query: bring {n} to room {n + 1}\nIntent: delivery\n") for n in range(40)]
asm = kvexp.method("asm", layout="pooled")
memory = kvexp.prepare(asm, model, prefix, traces, budget=256)
with asm.attach(model):
    ids = torch.tensor([prefix + encode("Query: carry 5 to room 9\nIntent:")])
    output = model.generate(ids, cache=asm.encode(model, prefix, memory), max_new_tokens=2, do_sample=False)
print(loaded.tokenizer.decode(output[0, len(prefix) :]))
