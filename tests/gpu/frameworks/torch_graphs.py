"""PyTorch: CUDA graphs (captured inference and a whole training step), events, streams, side-stream copies."""
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
static = torch.randn(64, 256, device="cuda")
with torch.inference_mode():
    eager = model(static).sum().item()
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        model(static)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(static)
    graph.replay()
    print(f"graph_equals_eager: {abs(captured.sum().item() - eager) < 1e-3}")
    static.copy_(torch.ones(64, 256))
    graph.replay()
    print(f"graph_new_input: {captured.sum().item():.4f}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
step = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(step):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
for _ in range(20):
    step.replay()
print(f"captured_training_loss: {loss.item():.4f}")
make = torch.cuda.make_graphed_callables(nn.Linear(32, 32).cuda(), (torch.randn(8, 32, device="cuda", requires_grad=True),))
out = make(torch.ones(8, 32, device="cuda", requires_grad=True))
out.sum().backward()
print(f"graphed_callable: {out.shape[0]}x{out.shape[1]}")
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
torch.ones(1 << 20, device="cuda").sum()
end.record()
end.synchronize()
print(f"event_time_positive: {start.elapsed_time(end) > 0}")
