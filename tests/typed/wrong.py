"""What users get wrong, in each line below the first statement (tests/test_typing.py)."""
# ruff: noqa: B018

import ringcomm

x = bytearray(4)
ringcomm.allreduce(x, 3)
ringcomm.allreduce(x, copression="bf16")
ringcomm.allreduce(x, compression="bf61")
ringcomm.allreduce(x, compression="topk:0.1")
ringcomm.allreduce_many([x], compression="bf61")
ringcomm.allgather(x, compression="bf61")
ringcomm.init().reduce_scatter(x, compression="int4 ")
ringcomm.allreduce(x, "mean")
ringcomm.reduce(x, 0, "average")
ringcomm.reduce(x, "sum")
ringcomm.Config(algorithm="tree")
ringcomm.Config(lane=2)
ringcomm.init(lanes=2)
ringcomm.allreduce(x).wait()
ringcomm.allreduce(x, async_op=True).append(1)
ringcomm.init().broadcast(x, async_op=True)[0]
ringcomm.barrier().wait()
ringcomm.allreduce(x, comm=0)
ringcomm.init().stats()["wire_byte"]
ringcomm.init().stats()["lanes"][0]["rate"].upper()
ringcomm.allreduce(x, "sum", "bf16")
ringcomm.allreduce(x, feedback=True)
ringcomm.allreduce(x, feedback={})
ringcomm.FeedbackStore()[0]
ringcomm.ErrorFeedback().count + 1
ringcomm.init("0")
ringcomm.Config(lanes="2")
ringcomm.Config().lanes = 3
ringcomm.rank() + ""
ringcomm.init().split(0).close()
ringcomm.RingcommError("x", rnk=1)
ringcomm.no_such_thing
