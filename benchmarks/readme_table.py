"""Print the README's table from benchmarks/results/cpu_minilm.json, so that no number in it is typed by hand."""

from __future__ import annotations

import json

from common import RESULTS

COLUMNS = {
    "eager": "eager",
    "inductor": "Inductor",
    "inductor-auto": "freezing + max-autotune",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "postlude": "**Postlude**",
    "postlude-freeze": "**Postlude, frozen**",
}


def main() -> None:
    """Print the table and the line that says how it was measured."""
    record = json.loads((RESULTS / "cpu_minilm.json").read_text(encoding="utf-8"))
    where = record["environment"]
    print("| batch × tokens | " + " | ".join(COLUMNS.values()) + " | speed-up over the best of torch |")
    print("| --- |" + " ---: |" * (len(COLUMNS) + 1))
    for point in record["points"]:
        timings, ratios = point["timings"], point["speedup_over_best"]["torch"]
        cells = [f"{timings[name]['median_ms']:.2f}" if name in timings else "–" for name in COLUMNS]
        print(
            f"| {point['dtype']}, {point['batch']} × {point['length']} | {' | '.join(cells)} "
            f"| {ratios['postlude']:.2f}x, frozen {ratios['postlude-freeze']:.2f}x |"
        )
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    print(
        f"\nMedian milliseconds per call, interleaved in one process: `{' '.join(record['command'])}` at {record['commit']}, "
        f"{where['threads']} threads of an {where['processor']} ({' '.join(where['features'])}), torch {where['torch']}, "
        f"{packages}, Python {where['python']}."
    )


if __name__ == "__main__":
    main()
