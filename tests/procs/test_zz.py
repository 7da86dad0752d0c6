import pytest
from dataclasses import replace
from meshwright.core.mesh import Mesh
from meshwright.core.plan import SyncPolicy
from tests.procs.spread import check, model_of, spread
@pytest.mark.parametrize("over",[("gathers","scatters"),("scatters",)])
def test_z(pool,over):
    model=model_of("gpt-tiny")
    plan,profile=spread(model, Mesh(shard=4),4,zero=3,precision="fp32")
    check(pool, model, replace(plan,sync=SyncPolicy(overlap=over)),profile,steps=5)
