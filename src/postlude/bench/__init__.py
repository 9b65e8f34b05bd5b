"""`postlude bench`: single matrix multiplications with what follows them, against the peers that are installed.

- `cases`: what is measured: sizes and epilogues, from the command line or a CSV
- `peers`: the ways to run one
- `run`: the measurement, as plain data
- `command`: the command
"""
