"""PyTorch: a convolutional and a transformer training loop with automatic mixed precision and a DataLoader with
workers and pinned memory."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(model, loader, dtype, scaler):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for inputs, targets in loader:
        inputs, targets = inputs.cuda(non_blocking=True), targets.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=dtype):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.body(x).mean(1))


def main():
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    images = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,)))
    conv = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).cuda()
    loader = DataLoader(images, 32, num_workers=2, pin_memory=True)
    losses = train(conv, loader, torch.float16, torch.amp.GradScaler("cuda"))
    print(f"conv_first_loss: {losses[0]:.4f}")
    print(f"conv_last_loss: {losses[-1]:.4f}")
    sequences = TensorDataset(torch.randn(128, 32, 128), torch.randint(0, 10, (128,)))
    loader = DataLoader(sequences, 16, num_workers=2, pin_memory=True)
    losses = train(Encoder().cuda(), loader, torch.bfloat16, torch.amp.GradScaler("cuda", enabled=False))
    print(f"transformer_first_loss: {losses[0]:.4f}")
    print(f"transformer_last_loss: {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
