"""PyTorch: a transformer encoder and a convolutional network, inference in fp16, bf16 and fp32."""
import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda().eval()
tokens = torch.randn(8, 64, 256, device="cuda")
with torch.inference_mode():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = encoder.to(dtype)(tokens.to(dtype)).float()
        print(f"encoder_{str(dtype)[6:]}_sum: {out.abs().sum().item():.4f}")
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU())
    net = net.cuda().eval().half()
    images = torch.randn(16, 3, 96, 96, device="cuda").half()
    print(f"conv_float16_sum: {net(images).float().sum().item():.3f}")
    channels_last = net.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    print(f"conv_channels_last_sum: {channels_last.float().sum().item():.3f}")
