"""PyTorch: tensors shared between processes (spawn) by CUDA IPC, and a forked child that must not use CUDA."""
import os

import torch
import torch.multiprocessing as mp


def double(queue, done):
    tensor = queue.get()
    tensor.mul_(2)
    torch.cuda.synchronize()
    del tensor
    done.put("ok")


def main():
    context = mp.get_context("spawn")
    queue, done = context.Queue(), context.Queue()
    tensor = torch.arange(1000, device="cuda", dtype=torch.float32)
    child = context.Process(target=double, args=(queue, done))
    child.start()
    queue.put(tensor)
    print(f"child: {done.get(timeout=60)}")
    child.join()
    print(f"doubled_by_child: {tensor.sum().item():.0f}")
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, device="cuda")
            os._exit(1)
        except RuntimeError:
            os._exit(7)
    print(f"forked_child_exit: {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
    print(f"parent_still_works: {torch.ones(10, device='cuda').sum().item():.0f}")


if __name__ == "__main__":
    main()
