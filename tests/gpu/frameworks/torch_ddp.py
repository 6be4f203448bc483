"""PyTorch DistributedDataParallel over NCCL, one rank per GPU (two); needs two devices."""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def rank_main(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank))
    value = torch.full((1 << 20,), rank + 1.0, device="cuda")
    dist.all_reduce(value)
    gathered = [torch.empty(4, device="cuda") for _ in range(world)]
    dist.all_gather(gathered, torch.full((4,), float(rank), device="cuda"))
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 8).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(10):
        inputs = torch.randn(32, 64, device="cuda")
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = sum(p.double().sum() for p in model.parameters())
    if rank == 0:
        print(f"all_reduce: {value.sum().item():.0f}")
        print(f"all_gather: {torch.cat(gathered).sum().item():.0f}")
        print(f"weights_after_training: {total.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if torch.cuda.device_count() < 2:
        sys.exit("two devices are needed")
    mp.spawn(rank_main, (2, 29500 + os.getpid() % 1000), nprocs=2)
