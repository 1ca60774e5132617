"""Private interfaces of torch that mezzo uses, and patches of torch classes: one file per mechanism.

Nothing else in the tree touches `torch._*`, ctypes or the attributes of a torch class;
`tests/test_fences.py` refuses it. A file states what its mechanism does, why mezzo needs it, which
torch releases have it and what breaks without it. Its test is
`tests/torch_mechanisms/test_<name>.py`: run these tests first when a new torch is out. Releases are
told apart by what they have (`getattr` with a fallback), never by their version.

These files hold mechanisms only. Decisions stay in `amp`, `optim` and `static`, which pass the
functions to call. Names are plain aliases where code that runs per operator or per
step uses them.
"""
