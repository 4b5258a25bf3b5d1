"""Statistics of tensors, warnings about a run, plots, and the place of the first inf or NaN.

    def train_step(state, batch, step):
        loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, batch, opt_state=state.opt_state)
        stats = jaxmp.monitor.step_stats(grads, state.opt_state, state.params, when=step % 10 == 0)
        state = state.apply_gradients(grads=grads)
        return state, loss, stats

    monitor = jaxmp.monitor.Monitor()
    for step, batch in enumerate(batches):
        state, loss, stats = train_step(state, batch, step)
        monitor.update(step, state.metrics, loss=loss, stats=stats)       # warns: names the layer and what to try

Nothing here changes a result. With `when=False`, the compiled program does not contain the statistics at all.

| question | functions |
|---|---|
| How large are the values of each tensor? (inside jit) | `tensor_stats`, `watch_activations`, `step_stats` |
| What is wrong with this run? (on the host) | `Monitor`, `MonitorWarning` |
| How do I watch it in a notebook? | `LiveMonitor` |
| How do I log it? | `log_metrics` |
| How do I draw it? | `plot_loss_and_scale`, `plot_exponents`, `plot_fp8`, `plot_layers` |
| Which leaf, which operation is not finite? | `first_nonfinite`, `first_bad_op` |
"""

from jaxmp._src.monitor.activations import watch_activations as watch_activations
from jaxmp._src.monitor.first_bad_op import first_bad_op as first_bad_op
from jaxmp._src.monitor.live import LiveMonitor as LiveMonitor
from jaxmp._src.monitor.log import log_metrics as log_metrics
from jaxmp._src.monitor.monitor import Monitor as Monitor, MonitorWarning as MonitorWarning
from jaxmp._src.monitor.nonfinite import first_nonfinite as first_nonfinite
from jaxmp._src.monitor.plots import (
    plot_exponents as plot_exponents,
    plot_fp8 as plot_fp8,
    plot_layers as plot_layers,
    plot_loss_and_scale as plot_loss_and_scale,
)
from jaxmp._src.monitor.step_stats import step_stats as step_stats
from jaxmp._src.monitor.tensor_stats import tensor_stats as tensor_stats
