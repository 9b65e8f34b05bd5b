"""`postlude.check`: eager, Inductor and Postlude side by side on the user's own model and inputs.

- `run`: the check itself, step by step
- `sides`, `state`, `values`: calling one model in three ways without changing it, and naming what comes out
- `exact`, `accuracy`: the float64 reference, and how far a result may be from it
- `watching`, `regions`: each Region on the values that it really gets
- `clock`, `memory`, `machine`, `startup`: latency, peak memory, what the machine can do, compile time
- `result`, `verdict`: what was found as plain data, and in one sentence
- `faults`: plants one, to prove that a check finds it
- `command`: `postlude check`

How results look is `postlude.report`'s to say.
"""
