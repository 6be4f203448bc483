//! Images: real ones, and what becomes of them by chance.

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt};
use std::io::Read;
use std::path::Path;

/// Takes any parameters, and writes to a variable of its own only: a launch of it can never touch other memory.
pub const SAFE: &str = "
.version 7.0
.target sm_70
.address_size 64

.visible .global .align 8 .b8 table[4096];

.visible .entry safe(.param .u64 where, .param .u32 first, .param .u32 second)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    ld.param.u32 %r1, [first];
    ld.param.u32 %r2, [second];
    mov.u32 %r3, %tid.x;
    and.b32 %r4, %r3, 1023;
    add.u32 %r5, %r1, %r2;
    mul.wide.u32 %rd1, %r4, 4;
    mov.u64 %rd2, table;
    add.s64 %rd3, %rd2, %rd1;
    st.global.u32 [%rd3], %r5;
    ret;
}

.visible .entry idle()
{
    ret;
}
";

/// Bytes of parameters that `safe` takes.
pub const SAFE_PARAMS: usize = 16;

/// The header of a fatbin, and of an entry.
const HEADER: usize = 16;
const ENTRY: usize = 64;

/// The longest image that is made here. Compiling takes its time, and is bounded elsewhere.
const LONGEST: usize = 256 << 10;

/// Images that the repository has.
pub struct Images {
    real: Vec<Vec<u8>>,
}

impl Images {
    /// Reads them from the folder of the sources.
    pub fn read() -> std::io::Result<Images> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let names = [
            "fixtures/attributes.ptx",
            "fixtures/conditional.ptx",
            "fixtures/conformance.ptx",
            "fixtures/softgpu.ptx",
            "fixtures/texture-references.ptx",
            "fixtures/textures.ptx",
            "fixtures/managed/variables.ptx",
            "fixtures/managed/variables.sm_90.cubin",
            "fixtures/nested.fatbin",
        ];
        let mut real = vec![SAFE.as_bytes().to_vec()];
        for name in names {
            real.push(std::fs::read(root.join(name))?);
        }
        let cubin = cubin_of(&real[real.len() - 1])?;
        let text = real[0].clone();
        real.push(fatbin(&[(1, &text)]));
        real.push(fatbin(&[(1, &text), (2, &cubin)]));
        real.push(cubin);
        Ok(Images { real })
    }

    /// A real image, mostly changed somewhere.
    pub fn any(&self, rng: &mut SmallRng) -> Vec<u8> {
        let Some(mut image) = self.real.choose(rng).cloned() else {
            return Vec::new();
        };
        for _ in 0..rng.random_range(0..4) {
            self.change(&mut image, rng);
        }
        image.truncate(LONGEST);
        image
    }

    fn change(&self, image: &mut Vec<u8>, rng: &mut SmallRng) {
        if image.is_empty() {
            return;
        }
        let at = rng.random_range(0..image.len());
        match rng.random_range(0..9) {
            0 => image.truncate(at),
            1 => {
                for _ in 0..rng.random_range(1..9) {
                    let at = rng.random_range(0..image.len());
                    image[at] ^= 1 << rng.random_range(0..8);
                }
            }
            // A field of a header: lengths, kinds, counts.
            2 => {
                let at = rng.random_range(0..image.len().min(HEADER + ENTRY)) & !3;
                let value = *[0, 1, 2, 8, 16, 64, u32::MAX, u32::MAX - 63, 1 << 31]
                    .choose(rng)
                    .unwrap_or(&0);
                let end = image.len().min(at + 4);
                image[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
            // Entries once more.
            3 if image.len() > HEADER + ENTRY => {
                let again = image[HEADER..HEADER + ENTRY].to_vec();
                image.splice(HEADER..HEADER, again);
            }
            // A second image behind the first.
            4 => {
                if let Some(other) = self.real.choose(rng) {
                    image.extend_from_slice(other);
                }
            }
            // A part of it again, at another place.
            5 => {
                let end = rng.random_range(at..image.len().min(at + 4096));
                let part = image[at..end].to_vec();
                let to = rng.random_range(0..image.len());
                image.splice(to..to, part);
            }
            // Words of a text in places where they do not belong.
            6 => {
                let words: [&[u8]; 8] = [
                    b" .global .align 4 .b8 x[4294967295];\n",
                    b" .global .align 4 .b8 y[18446744073709551615];\n",
                    b"/*",
                    b"//",
                    b"{{{{{{{{",
                    b".visible .entry again() { ret; }\n",
                    b".param .align 1 .b8 p[65536]",
                    b"\0",
                ];
                let word = words.choose(rng).copied().unwrap_or_default();
                image.splice(at..at, word.iter().copied());
            }
            7 => {
                let end = (at + rng.random_range(1..64)).min(image.len());
                image.drain(at..end);
            }
            _ => {
                let end = (at + rng.random_range(1..64)).min(image.len());
                rng.fill_bytes(&mut image[at..end]);
            }
        }
    }
}

/// A fatbin of uncompressed entries: kind and code.
fn fatbin(entries: &[(u16, &[u8])]) -> Vec<u8> {
    let mut inside = Vec::new();
    for (kind, code) in entries {
        let len = code.len().next_multiple_of(8);
        let mut head = [0; ENTRY];
        head[..2].copy_from_slice(&kind.to_le_bytes());
        head[2..4].copy_from_slice(&0x0101u16.to_le_bytes());
        head[4..8].copy_from_slice(&(ENTRY as u32).to_le_bytes());
        head[8..16].copy_from_slice(&(len as u64).to_le_bytes());
        head[28..32].copy_from_slice(&70u32.to_le_bytes());
        inside.extend_from_slice(&head);
        inside.extend_from_slice(code);
        inside.resize(inside.len() + len - code.len(), 0);
    }
    let mut all = 0xBA55_ED50u32.to_le_bytes().to_vec();
    all.extend_from_slice(&1u16.to_le_bytes());
    all.extend_from_slice(&(HEADER as u16).to_le_bytes());
    all.extend_from_slice(&(inside.len() as u64).to_le_bytes());
    all.extend_from_slice(&inside);
    all
}

/// The cubin in a fatbin of one entry that Zstandard has compressed.
fn cubin_of(fatbin: &[u8]) -> std::io::Result<Vec<u8>> {
    let head = &fatbin[HEADER..HEADER + ENTRY];
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let code = HEADER + word(4) as usize;
    let code = &fatbin[code..code + word(16) as usize];
    let mut cubin = Vec::new();
    ruzstd::decoding::StreamingDecoder::new(code)
        .map_err(std::io::Error::other)?
        .read_to_end(&mut cubin)?;
    Ok(cubin)
}
