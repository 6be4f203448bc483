//! Images that callers load: PTX text, or a fatbin that contains PTX.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use mpsshim_api::cuda::*;

const WRAPPER: u32 = 0x466243B1;
const FATBIN: u32 = 0xBA55ED50;
const ELF: u32 = 0x464C457F;
/// No image is larger; a size field that says so is damaged.
const LIMIT: u64 = 1 << 30;
const ENTRY_PTX: u16 = 1;
/// Flags of a fatbin entry whose payload is compressed (LZ4, Zstandard).
const COMPRESSED: u64 = 0x2000 | 0x8000;

/// Why an image was refused: the status and a sentence for the caller's log.
pub struct Refused(pub CUresult, pub String);

fn refused<T>(status: CUresult, reason: &str) -> Result<T, Refused> {
    Err(Refused(status, reason.into()))
}

/// Copies memory of this process that may not be there: an image's size is only what it says itself.
fn read(address: u64, bytes: u64) -> Result<Vec<u8>, Refused> {
    if bytes > LIMIT {
        return refused(
            CUDA_ERROR_INVALID_IMAGE,
            "the image gives an impossible size",
        );
    }
    let mut out = vec![0u8; bytes as usize];
    // Not process_vm_readv, which containers may not call.
    let memory = File::open("/proc/self/mem");
    match memory.and_then(|memory| memory.read_exact_at(&mut out, address)) {
        Ok(()) => Ok(out),
        Err(_) => refused(CUDA_ERROR_INVALID_IMAGE, "the image is cut off"),
    }
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<u64, Refused> {
    let Some(field) = bytes.get(at..at + N) else {
        return refused(CUDA_ERROR_INVALID_IMAGE, "the image is cut off");
    };
    Ok(field.iter().rev().fold(0, |v, &b| v << 8 | u64::from(b)))
}

/// A comment with which a text says how many milliseconds its load takes: the time that the genuine driver would take to
/// compile a large one.
const TAKES: &str = "// softgpu: takes ms ";

/// Takes as long as a text says that its load takes, a minute at the most.
pub fn take_time(text: &str) {
    let Some((_, behind)) = text.split_once(TAKES) else {
        return;
    };
    let digits = behind.split(|c: char| !c.is_ascii_digit()).next();
    let time = digits.and_then(|digits| digits.parse().ok()).unwrap_or(0);
    std::thread::sleep(Duration::from_millis(u64::min(time, 60_000)));
}

/// Ends the process if a text contains that of `SOFTGPU_ENDS_AT`, as a driver that crashes.
pub fn end_at(text: &str) {
    let at = std::env::var("SOFTGPU_ENDS_AT").ok();
    if at.is_some_and(|at| !at.is_empty() && text.contains(&at)) {
        std::process::exit(1);
    }
}

/// Never returns if a text contains that of `SOFTGPU_HANGS_AT`, as a driver that hangs.
pub fn hang_at(text: &str) {
    let at = std::env::var("SOFTGPU_HANGS_AT").ok();
    while at
        .as_ref()
        .is_some_and(|at| !at.is_empty() && text.contains(at))
    {
        std::thread::park();
    }
}

/// The PTX text of the image at `address`.
pub fn ptx_at(address: u64) -> Result<String, Refused> {
    if address == 0 {
        return refused(CUDA_ERROR_INVALID_VALUE, "no image");
    }
    let magic = number::<4>(&read(address, 4)?, 0)? as u32;
    match magic {
        WRAPPER => fatbin(number::<8>(&read(address, 16)?, 8)?),
        FATBIN => fatbin(address),
        ELF => refused(
            CUDA_ERROR_NO_BINARY_FOR_GPU,
            "the image holds machine code; only PTX can run here",
        ),
        _ => {
            let mut text = Vec::new();
            loop {
                let at = address + text.len() as u64;
                let page = read(at, 4096 - at % 4096)?;
                if let Some(end) = page.iter().position(|&b| b == 0) {
                    text.extend_from_slice(&page[..end]);
                    return text_of(text);
                }
                text.extend_from_slice(&page);
                if text.len() as u64 > LIMIT {
                    return refused(CUDA_ERROR_INVALID_IMAGE, "the text has no end");
                }
            }
        }
    }
}

pub fn text_of(bytes: Vec<u8>) -> Result<String, Refused> {
    String::from_utf8(bytes).or_else(|_| {
        refused(
            CUDA_ERROR_INVALID_IMAGE,
            "the image is neither text nor a known format",
        )
    })
}

fn fatbin(address: u64) -> Result<String, Refused> {
    let header = read(address, 16)?;
    if number::<4>(&header, 0)? as u32 != FATBIN {
        return refused(
            CUDA_ERROR_INVALID_IMAGE,
            "the wrapper does not lead to a fatbin",
        );
    }
    let bytes = number::<2>(&header, 6)?.saturating_add(number::<8>(&header, 8)?);
    entries(&read(address, bytes)?)
}

/// Looks for the newest PTX among the entries of a fatbin.
fn entries(bytes: &[u8]) -> Result<String, Refused> {
    let end = number::<2>(bytes, 6)?.saturating_add(number::<8>(bytes, 8)?);
    if end > bytes.len() as u64 {
        return refused(CUDA_ERROR_INVALID_IMAGE, "the image is cut off");
    }
    let (mut at, mut best, mut compressed) = (number::<2>(bytes, 6)? as usize, None, false);
    while at < end as usize {
        let kind = number::<2>(bytes, at)? as u16;
        let (header, padded) = (
            number::<4>(bytes, at + 4)? as usize,
            number::<8>(bytes, at + 8)?,
        );
        let (target, flags) = (number::<4>(bytes, at + 28)?, number::<8>(bytes, at + 40)?);
        let start = at + header;
        let payload = usize::try_from(padded)
            .ok()
            .and_then(|n| bytes.get(start..start.checked_add(n)?));
        let Some(payload) = payload.filter(|_| header >= 64) else {
            return refused(
                CUDA_ERROR_INVALID_IMAGE,
                "an entry of the fatbin is cut off",
            );
        };
        if kind == ENTRY_PTX && flags & COMPRESSED != 0 {
            compressed = true;
        } else if kind == ENTRY_PTX && best.as_ref().is_none_or(|&(t, _)| t < target) {
            best = Some((target, payload));
        }
        at = start + payload.len();
    }
    match best {
        Some((_, text)) => {
            let end = text.iter().position(|&b| b == 0).unwrap_or(text.len());
            text_of(text[..end].to_vec())
        }
        None if compressed => refused(
            CUDA_ERROR_NO_BINARY_FOR_GPU,
            "the PTX in the fatbin is compressed; build it with `nvcc --no-compress`",
        ),
        None => refused(
            CUDA_ERROR_NO_BINARY_FOR_GPU,
            "the fatbin holds no PTX, and machine code cannot run here",
        ),
    }
}
