"""The training job of the demo: a Ray Train run with a bug that a person could have written.

Four ranks fit a small network, each on its own shard, and average their gradients after each step. Which bug
is chosen with --fault; whichever it is, nobody moves again, and nobody fails.

skip: a rank whose loss is not finite skips its step, and with it the averaging that the others wait in: it
goes on to `ray.train.report`, where Ray waits for all ranks, while the others wait for it in all_reduce. One
record of shard 2 was cut off when it was written. A run that starts from step 0 draws it in step 12. The
order of records depends on the step that training starts from, so that a resumed run does not see the same
records again; no order of a resumed run comes to that record within 200 steps (tests/unit/test_demo_data.py).

symmetric: the warm-up of a run that starts from step 0 ends with step 12. Then each rank is to go on with
the momentum of its neighbour, and asks for it with a broadcast whose source is that neighbour. A broadcast
has one source for all: here each rank waits to receive, and none sends. All have launched the same. A resumed
run has no warm-up.

    python -m deployments.demo.train --storage-path /tmp/demo --run-name demo

The job's environment, set by whoever submits it:

    RAY_TRAIN_ENABLE_STATE_TRACKING=1     the dashboard knows the run
    RAY_TRAIN_CALLBACKS=deployments.training_job.rankwatch_job.RankwatchCallback
    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.5 a report of a step waits for the controller's poll: 2 s by default
    TORCH_FR_BUFFER_SIZE=2000             records that each rank's Flight Recorder keeps
    RANKWATCH_SOCKET_DIR=/tmp/rankwatch-0 where the stand-in for NCCL's RAS finds the ranks (default)
"""

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, get_args

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch import nn

MOST_STEPS = 200
FEATURES = 16
BATCH_RECORDS = 8
SHARD_RECORDS = 65_536
CORRUPT_SHARD = 2
CORRUPT_RECORD = 54_905
HANGS_AT_STEP = 12

Fault = Literal["skip", "symmetric", "none"]

logger = logging.getLogger("ray.train.demo")


def order_of_records(first_step: int) -> torch.Tensor:
    """The order in which a run that starts from `first_step` draws the records of a shard."""
    return torch.randperm(SHARD_RECORDS, generator=torch.Generator().manual_seed(first_step))


def load_shard(shard: int, *, corrupt: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The records of a shard as they were written.

    Args:
        shard: Its number.
        corrupt: Whether the one record was cut off.

    Returns:
        Inputs of shape (SHARD_RECORDS, FEATURES) and targets of shape (SHARD_RECORDS, 1), float32.
    """
    source = torch.Generator().manual_seed(1000 + shard)
    inputs = torch.randn(SHARD_RECORDS, FEATURES, generator=source)
    weights = torch.linspace(-1.0, 1.0, FEATURES).unsqueeze(1)
    targets = torch.tanh(inputs @ weights) + 0.1 * torch.randn(SHARD_RECORDS, 1, generator=source)
    if corrupt and shard == CORRUPT_SHARD:
        inputs[CORRUPT_RECORD, FEATURES // 2 :] = torch.nan
    return inputs, targets


def average_gradients(model: nn.Module) -> None:
    """One all_reduce for each layer's gradients, the last layer first, as they become ready."""
    for layer in reversed([module for module in model.modules() if isinstance(module, nn.Linear)]):
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        bucket = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(bucket)
        bucket /= dist.get_world_size()
        for gradient, averaged in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient))


def descend(model: nn.Module, velocity: dict[str, torch.Tensor]) -> None:
    """A step of gradient descent with momentum. By hand, because torch.optim costs each rank 3 s of CPU to
    import, and four ranks share a small machine.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            velocity[name].mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.05 * velocity[name])


def pass_momentum_on(velocity: dict[str, torch.Tensor]) -> None:
    """Take over the momentum of the next rank. The bug of `symmetric`: this wants a send and a receive."""
    neighbour = (dist.get_rank() + 1) % dist.get_world_size()
    for momentum in velocity.values():
        dist.broadcast(momentum, src=neighbour)


def train_loop(config: dict[str, Any]) -> None:
    """What each rank runs.

    Args:
        config: steps, step_s (seconds that a step takes at least), checkpoint_every (steps), fault.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = get_device()
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    first_step = restore(model, velocity)
    rank = ray.train.get_context().get_world_rank()
    inputs, targets = load_shard(rank, corrupt=config["fault"] == "skip")
    order = order_of_records(first_step)
    if rank == 0:
        print(f"training from step {first_step + 1} on", flush=True)
    for step in range(first_step, config["steps"]):
        end = time.monotonic() + config["step_s"]
        at = (step - first_step) * BATCH_RECORDS
        batch = order[at : at + BATCH_RECORDS]
        loss = nn.functional.mse_loss(model(inputs[batch].to(device)), targets[batch].to(device))
        if torch.isfinite(loss):
            model.zero_grad()
            loss.backward()
            average_gradients(model)
            descend(model, velocity)
        else:
            # The bug of `skip`: a decision that all ranks have to take together is taken by one of them.
            logger.warning("step %d: the loss is %s, batch skipped", step, loss.item())
        if config["fault"] == "symmetric" and first_step == 0 and step == HANGS_AT_STEP:
            pass_momentum_on(velocity)
        time.sleep(max(0.0, end - time.monotonic()))
        if rank == 0:
            print(f"step {step + 1} of {config['steps']}, loss {loss.item():.3f}", flush=True)
        metrics = {"step": step, "loss": loss.item(), "started_from": first_step}
        report(metrics, model, velocity, keep=(step + 1) % config["checkpoint_every"] == 0)


def report(
    metrics: dict[str, Any], model: nn.Module, velocity: dict[str, torch.Tensor], *, keep: bool
) -> None:
    """Report a step, and from rank 0 a checkpoint where one is due. Ray waits for all ranks in here."""
    if not keep or ray.train.get_context().get_world_rank() != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {
            "next_step": metrics["step"] + 1,
            "model": model.state_dict(),
            "velocity": velocity,
        }
        torch.save(state, Path(folder, "state.pt"))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def restore(model: nn.Module, velocity: dict[str, torch.Tensor]) -> int:
    """Load the last checkpoint if there is one; returns the step to go on with."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, "state.pt"), map_location=get_device())
    model.load_state_dict(state["model"])
    velocity.update(state["velocity"])
    return int(state["next_step"])


def trainer(options: argparse.Namespace) -> TorchTrainer:
    """The run, ready to start."""
    return TorchTrainer(
        train_loop,
        train_loop_config={
            "steps": options.steps,
            "step_s": options.step_s,
            "checkpoint_every": options.checkpoint_every,
            "fault": options.fault,
        },
        torch_config=TorchConfig(backend=options.backend),
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.workers, use_gpu=options.backend == "nccl"
        ),
        run_config=ray.train.RunConfig(
            name=options.run_name,
            storage_path=str(Path(options.storage_path).absolute()),
            failure_config=ray.train.FailureConfig(max_failures=options.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="The training job of the demo: it hangs once.")
    parser.add_argument("--fault", choices=get_args(Fault), default="skip", help="what makes it hang")
    parser.add_argument("--storage-path", required=True)
    parser.add_argument("--run-name", required=True)
    parser.add_argument("--workers", type=int, default=4, help="3 or more: shard 2 holds the corrupt record")
    parser.add_argument("--steps", type=int, default=40, help=f"at most {MOST_STEPS}")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds that a step takes at least")
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=5,
        help=f"steps; with more than {HANGS_AT_STEP} each attempt starts from step 0 and hangs again",
    )
    parser.add_argument("--max-failures", type=int, default=2)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    options = parser.parse_args(arguments)
    if not 0 < options.steps <= MOST_STEPS:
        parser.error(f"--steps must be from 1 to {MOST_STEPS}, not {options.steps}")
    return options


def main() -> None:
    """Run to the end and print the last metrics as one line of JSON.

    Raises:
        TrainingFailedError: the run failed more often than it may.
    """
    result = trainer(parse()).fit()
    print(json.dumps({"metrics": result.metrics, "path": result.path}), flush=True)


if __name__ == "__main__":
    main()
