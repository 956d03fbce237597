"""`python -m support.fuzz --seed 0 --count 10000`, with tests/ on the path."""

from __future__ import annotations

import argparse
import gc
import sys
import time

import torch
import torch._dynamo  # the first optimizer would import it, after `gc.freeze`

from support.fuzz.campaign import Campaign
from support.fuzz.cases import draw, from_json, to_json
from support.fuzz.surroundings import scratch
from support.interrupts import heed_interrupts

EVERY_S = 10.0  # seconds between lines of progress


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--case", help="one case as JSON, as a failure prints it")
    parser.add_argument("--most", type=int, default=5, help="failures, then it ends")
    parser.add_argument("--as-it-is", action="store_true", help="do not shrink what fails")
    parser.add_argument("--show", action="store_true", help="print each case before it runs")
    options = parser.parse_args()
    heed_interrupts()
    torch.set_num_threads(1)
    gc.freeze()
    with scratch() as folder:
        campaign = Campaign(folder / "case")
        cases = map(draw, range(options.seed, options.seed + options.count))
        said_s = time.monotonic()
        for case in [from_json(options.case)] if options.case else cases:
            if options.show:
                print(to_json(case), flush=True)
            failure = campaign.add(case, shrinks=not options.as_it_is)
            if failure is not None:
                print(failure, flush=True)
            if time.monotonic() - said_s > EVERY_S:
                said_s = time.monotonic()
                print(campaign.summary(), flush=True)
            if len(campaign.failures) >= options.most:
                break
        print(campaign.summary())
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
