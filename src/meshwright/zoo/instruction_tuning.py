"""A language model trained on answers: the same model, with samples that say which token is to be predicted at each place, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.core.errors import RequestError
from meshwright.core.task import Field, Loss, Task
from meshwright.zoo import huggingface, losses

if TYPE_CHECKING:
    from collections.abc import Mapping

_ANSWER_LOSSES: Mapping[Loss, Loss] = {losses.next_token_loss: losses.answer_token_loss, huggingface.causal_loss: huggingface.answer_token_loss}


def instruction_task(task: Task) -> Task:
    """`task` on instructions and answers. Its loss is (sum, count) over the answers' tokens, so ranks with longer answers weigh more."""
    counted = _ANSWER_LOSSES.get(task.loss)
    if counted is None or task.tokens_per_sample is None:
        raise RequestError(f"instructions and answers train language models of the zoo and hf: models; {task.name} is neither: leave --data out")
    tokens = Field((task.tokens_per_sample,), "int64", task.fields["tokens"].high)
    return replace(task, loss=counted, fields={"tokens": tokens, "targets": tokens}, data="")
