"""Measures and checks every kernel on this machine: python tests/benchmarks/kernels.py [--operation NAME]

Prints a table: the time of a call inside a compiled step, the bytes that it has to move over that time, their share of
what a copy reaches here, and the largest error beside that of MLX's own operations in the same dtype.
"""

import argparse
import datetime
import sys

import mlx.core as mx

from metalctl.kernels import measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operation", help="only this one")
    wanted = parser.parse_args().operation
    bandwidth = measure.copy_bandwidth()
    cases = [case for case in measure.default_cases() if wanted in (None, case.operation)]
    print(f"{mx.device_info().get('device_name')}, MLX {mx.__version__}, {datetime.date.today()}")
    print(f"copy: {bandwidth / 1e9:.0f} GB/s read and written\n")
    print(
        "| operation | case | us | GB/s | of a copy | error | plain |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    )
    sound = True
    for result in measure.measure(cases, bandwidth):
        speed = f"{result.seconds * 1e6:.0f} | {result.bytes_per_second / 1e9:.0f} | {result.share:.0%}"
        mark = "" if result.sound else " **too far off**"
        errors = f"{result.error:.1e}{mark} | {result.plain_error:.1e}"
        print(f"| {result.operation} | {result.name} | {speed} | {errors} |", flush=True)
        sound = sound and result.sound
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
