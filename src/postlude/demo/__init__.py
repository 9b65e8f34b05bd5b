"""What `postlude demo` runs: a real sentence encoder on a small corpus, measured side by side.

`minilm` loads the model, `corpus.txt` is the text, `timing` measures callables interleaved. Printing is in `postlude.cli`;
the scripts in benchmarks/ use the same model and the same clock, so that no number has two definitions.
"""
