"""`python -m jaxmp`: shows what jaxmp does on this machine, and runs some tools.

python -m jaxmp              this list; --version prints the version
python -m jaxmp doctor       versions, devices, which backend runs each operation and why, and what to do next
python -m jaxmp formats      fp32, tf32, bf16, fp16, e4m3, e5m2 and e2m1 in numbers; fp8 and fp4 recipes as measured
python -m jaxmp memory 124M              bytes of so many parameters under each recipe, with Adam
python -m jaxmp memory module:function   the plan of jaxmp.memory that your function returns, or several by name
python -m jaxmp checkpoint runs/a        the steps, leaves, dtypes and sizes of a checkpoint, and whether each is what
                                         was saved: exits with 0 if all is whole, 1 if not, 2 if there is none
python -m jaxmp replay captures module:loss_fn     runs a step of jaxmp.monitor.capture again, alone: exits with 0 if
                                         the fault does not come back, 1 if it does, 2 if the step cannot run
"""

import argparse
import functools
import importlib.metadata
import platform
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jaxmp
from jaxmp._src.base import named_functions, next_steps, tables
from jaxmp._src.checkpoint import inspection
from jaxmp._src.fp8 import backends, recipe_guide
from jaxmp._src.memory import plan
from jaxmp._src.numerics import formats
from jaxmp._src.replay import replay

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "jmp")  # that are installed

_FACTORS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxmp", description="What jaxmp does on this machine.")
    parser.add_argument("--version", action="version", version=f"jaxmp {jaxmp.__version__}")
    parser.set_defaults(run=functools.partial(_print_help, parser))
    commands = parser.add_subparsers(title="commands", metavar="command")
    shown = "versions, devices, the backend of each operation, and what to do next"
    command = commands.add_parser("doctor", aliases=["backends"], help=shown)
    command.set_defaults(run=_print_backends)
    command = commands.add_parser("formats", help="formats from fp32 to fp4 in numbers, and recipes as measured")
    command.set_defaults(run=_print_formats)
    command = commands.add_parser("memory", help="bytes of params, masters, moments and gradients; or a plan of yours")
    command.add_argument(
        "what",
        nargs="?",
        type=_plans_of,
        default="1e9",
        help="a number of parameters (124M, 1.5e9), or module:function that returns a plan, or a dict of them",
    )
    command = commands.add_parser("checkpoint", help="what a checkpoint holds, and whether it is what was saved")
    command.add_argument("directory", help="a directory of steps, or the folder of one step")
    command.add_argument("--step", type=int, help="the step to look at (default: all, with the leaves of the newest)")
    command.set_defaults(command=command)
    command = commands.add_parser("replay", help="a captured step again: was it the numbers, or the machine?")
    command.add_argument("capture", help="the folder of a capture, or of several, of which the last is taken")
    help_loss = "the loss function, as module:function or file.py:function; default: as the capture names it"
    command.add_argument("loss_fn", nargs="?", type=_function_of, help=help_loss)
    command.add_argument("--times", type=int, default=3, help="how often it runs (default 3)")
    help_like = "a function of yours that makes arguments like those captured; see jaxmp.monitor.load_capture"
    command.add_argument("--like", type=_function_of, metavar="module:function", help=help_like)
    parsed = parser.parse_args(arguments)
    if "what" in parsed:
        parsed.run = functools.partial(_print_plans, parsed.what)
    if "directory" in parsed:
        parsed.run = functools.partial(_print_checkpoint, parsed)
    if "capture" in parsed:
        parsed.run = functools.partial(_print_replay, command, parsed)
    return parsed.run()


def _print_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def _print_backends() -> int:
    print(f"jaxmp {jaxmp.__version__}: {', '.join(_versions())}\n")
    print(*_devices(), "", sep="\n")
    print(tables.columns([("operation", "backend", "because, or where"), *backends.backends()]))
    print("\nWhat to do next:", *next_steps.next_steps(), sep="\n- ")
    return 0


def _print_formats() -> int:
    recipes = tables.columns(recipe_guide.rows(jaxmp.fp8))
    print(tables.columns(formats.rows()), "", recipes, "", *recipe_guide.NOTES, sep="\n")
    return 0


def _plans_of(what: str) -> dict[str, plan.Plan]:
    """The plans that the argument of `memory` names; raises argparse's errors."""
    if ":" not in what:
        return plan.overview(_number_of(what))
    try:
        made = _function_of(what)()
    except argparse.ArgumentTypeError:
        raise
    except Exception as e:  # a function of the user's, which may raise anything
        raise argparse.ArgumentTypeError(
            f"{what!r} must be a function without arguments that returns a plan of jaxmp.memory, or a dict of them; it "
            f"raised {type(e).__name__}: {e}"
        ) from e
    plans = {what.rpartition(":")[2]: made} if isinstance(made, plan.Plan) else made
    if not isinstance(plans, dict) or not all(isinstance(p, plan.Plan) for p in plans.values()):
        raise argparse.ArgumentTypeError(
            f"{what!r} must return a plan of jaxmp.memory or a dict of them; got {type(made).__name__}"
        )
    return plans


def _number_of(what: str) -> float:
    """A number of parameters, as papers and people write it: 124e6, 124M, 1.5B, 350_000, 1,500,000."""
    factor = _FACTORS.get(what.strip()[-1:].upper(), 1)
    digits = what.strip().replace(",", "")
    try:
        number = float(digits if factor == 1 else digits[:-1]) * factor
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e18:
        raise argparse.ArgumentTypeError(
            f"neither a number of parameters from 1 to 1e18 (124e6, 124M, 1.5B) nor module:function: {what!r}"
        )
    return number


def _print_plans(plans: dict[str, plan.Plan]) -> int:
    print(plan.table(plans))
    if all(planned.activations is None for planned in plans.values()):
        print(
            "\nWithout activations, which depend on the model and the batch, and are often the largest part: give\n"
            "jaxmp.memory.plan the loss and a batch."
        )
    return 0


def _function_of(name: str) -> Callable[..., Any]:
    try:
        return named_functions.function_of(name)
    except Exception as e:  # the user's module may raise anything when it is imported
        raise argparse.ArgumentTypeError(str(e)) from e


def _print_replay(command: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    try:
        like = None if parsed.like is None else parsed.like()
        found = replay.replay(parsed.capture, parsed.loss_fn, times=parsed.times, like=like)
    except Exception as e:  # the loss function may raise anything, and status 1 would mean that the step is not finite
        if not isinstance(e, (ValueError, FileNotFoundError)):
            traceback.print_exc()
        command.error(str(e))
    print(found)
    return 0 if found.clean else 1


def _print_checkpoint(parsed: argparse.Namespace) -> int:
    try:
        text, whole = inspection.report(parsed.directory, parsed.step)
    except ValueError as e:
        parsed.command.error(str(e))
    print(text)
    return 0 if whole else 1


def _versions() -> list[str]:
    found = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _devices() -> list[str]:
    kinds = Counter((d.device_kind, getattr(d, "compute_capability", None)) for d in jax.devices())
    return [
        f"{n} x {kind}" + (f", compute capability {capability}" if capability else "")
        for (kind, capability), n in kinds.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
