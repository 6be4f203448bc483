"""JAX: jit, grad, scan, pure_callback, pmap on one device, random numbers, convolution, linear algebra."""
import jax
import jax.numpy as jnp
import numpy as np

print(f"platform: {jax.devices()[0].platform}")
key = jax.random.key(0)
a = jax.random.normal(key, (512, 512), jnp.float32)
print(f"jit: {float(jax.jit(lambda x: jnp.tanh(x @ x / 512).sum())(a)):.3f}")
print(f"grad: {float(jnp.abs(jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(a)).sum()):.2f}")
print(f"scan: {float(jax.lax.scan(lambda c, x: (c * 0.9 + x.sum(), c), 0.0, a)[0]):.3f}")
double = jax.jit(lambda x: jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum())
for _ in range(3):
    total = float(double(a))
print(f"pure_callback: {total:.3f}")
print(f"pmap: {float(jax.pmap(lambda x: x * 2)(a[None]).sum()):.3f}")
images = jax.random.normal(key, (8, 3, 32, 32))
kernel = jax.random.normal(key, (16, 3, 3, 3))
print(f"conv: {float(jax.jit(lambda i, k: jax.lax.conv(i, k, (1, 1), 'SAME'))(images, kernel).sum()):.2f}")
spd = a @ a.T + 512 * jnp.eye(512)
print(f"cholesky: {float(jnp.log(jnp.diag(jnp.linalg.cholesky(spd))).sum()):.3f}")
print(f"fft: {float(jnp.abs(jnp.fft.fft2(a)).mean()):.3f}")
print(f"sort: {float(jnp.sort(a.ravel())[1000]):.5f}")


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


w = jnp.zeros((512,))
x, y = a, jnp.sign(a[:, 0])
step = jax.jit(lambda w: w - 0.1 * jax.grad(loss)(w, x, y))
for _ in range(50):
    w = step(w)
print(f"trained: {float(loss(w, x, y)):.4f}")
