"""Random rounds of random layers with recurrent state; prints the largest errors (`state_rounds`).

python -m plugins.cuda_triton.tools.state_fuzz --rounds 1000 --device cuda
"""

from __future__ import annotations

import argparse

from plugins.cuda_triton.tools.state_layers import geometries
from plugins.cuda_triton.tools.state_rounds import Rounds


def main() -> None:
    """Run rounds over many layers and print the largest errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=40, help="number of random layers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="small layers only, for a CPU")
    args = parser.parse_args()
    made = geometries(args.layers, args.device, args.seed, args.small)
    if args.device != "cpu":
        from draftmark_cuda_triton.compiled.prepare import store_kernels
        from draftmark_cuda_triton.state.kernel_list import state_calls_of

        store_kernels([spec for one in made for spec in state_calls_of(one)])
    worst: dict[str, float] = {}
    failed = 0
    for number, geometry in enumerate(made):
        rounds = Rounds(geometry, args.device, 1000 * args.seed + number)
        try:
            for _ in range(number, args.rounds, args.layers):
                rounds.run()
        except AssertionError as error:
            failed += 1
            print("FAILED", number, error)
        worst |= {name: max(one, worst.get(name, 0.0)) for name, one in rounds.worst.items()}
    for name, one in sorted(worst.items()):
        print(f"{name:32} {one:.2e}")
    print(f"{args.rounds} rounds over {args.layers} layers, {failed} layers failed")


if __name__ == "__main__":
    main()
