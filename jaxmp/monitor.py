"""See what the numbers do: statistics of tensors, what is wrong with a run, pictures, one step again.

    def train_step(state, batch, step):
        loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, batch, opt_state=state.opt_state)
        stats = jaxmp.monitor.step_stats(grads, state.opt_state, state.params, when=step % 10 == 0)
        state = state.apply_gradients(grads=grads)
        return state, loss, stats

    monitor = jaxmp.monitor.Monitor()
    for step, batch in enumerate(batches):
        state, loss, stats = train_step(state, batch, step)
        monitor.update(step, state.metrics, loss=loss, stats=stats)       # warns: which layer, and what to try

All of it is read-only: it changes no result, and what is switched off (`when=False`) is not in the program.

In this order: `tensor_stats`, `watch_activations`, `step_stats` (in jit) -> `Monitor`, `Finding` (on the host) ->
`log_metrics` (elsewhere) -> `plot_*` (pictures).
"""

from jaxmp._activations import watch_activations as watch_activations
from jaxmp._log import log_metrics as log_metrics
from jaxmp._monitor import Monitor as Monitor, MonitorWarning as MonitorWarning
from jaxmp._pictures import (
    plot_exponents as plot_exponents,
    plot_fp8 as plot_fp8,
    plot_layers as plot_layers,
    plot_loss_and_scale as plot_loss_and_scale,
)
from jaxmp._rules import Finding as Finding
from jaxmp._step_stats import Fp8Stats as Fp8Stats, StepStats as StepStats, step_stats as step_stats
from jaxmp._tensor_stats import FORMATS as FORMATS, TensorStats as TensorStats, tensor_stats as tensor_stats
