//! The device and host threads use different bytes of one block at the same time.

use super::*;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};

/// The device has the first `width` bytes of each `step` bytes from `start` on, as many as fit; the host has the others.
#[derive(Clone, Copy)]
struct Share {
    len: usize,
    start: usize,
    step: usize,
    width: usize,
}

impl Share {
    fn new(random: &mut Random, most: usize) -> Share {
        let len = random.size(most.min(1 << 20)).max(16);
        let start = random.below(len / 2);
        let steps = [2, 3, 8, 64, 100, 1000, 4096, 4097, 8192, 65536];
        let step = match random.below(steps.len() + 3) {
            // One range of the device.
            number if number >= steps.len() => len,
            number => steps[number].min(len),
        };
        let width = match random.below(3) {
            0 => 1,
            1 => step / 2,
            _ => random.below(step - 1) + 1,
        };
        let width = match step == len {
            true => (len - start).min(width),
            false => width,
        };
        Share {
            len,
            start,
            step,
            width,
        }
    }

    /// Bytes of the device, that is threads of a kernel.
    fn count(&self) -> usize {
        let all = self.len - self.start;
        all / self.step * self.width + (all % self.step).min(self.width)
    }

    fn is_of_the_device(&self, offset: usize) -> bool {
        offset >= self.start && (offset - self.start) % self.step < self.width
    }
}

/// What a host function needs to use the device's bytes between two kernels.
struct Between {
    at: u64,
    share: Share,
    /// What the device's bytes must be when it runs; those of the host are not looked at.
    expected: Vec<u8>,
    add: u8,
    told: Sender<Outcome>,
}

unsafe extern "C" fn between(data: *mut c_void) {
    // SAFETY: `chain` below made it for this call.
    let given = unsafe { Box::from_raw(data.cast::<Between>()) };
    let mut outcome = Ok(());
    for offset in 0..given.share.len {
        if given.share.is_of_the_device(offset) && outcome.is_ok() {
            let at = given.at + offset as u64;
            let (expected, got) = (given.expected[offset], load(at));
            outcome = same("in a host function", at, &[expected], &[got]);
            store(at, got.wrapping_add(given.add));
        }
    }
    // Whoever waits has gone if it failed otherwise.
    let _ = given.told.send(outcome);
}

/// The device's bytes, as the host sees them.
fn check(what: &str, at: u64, share: &Share, model: &[u8]) -> Outcome {
    for (offset, expected) in model.iter().enumerate() {
        if share.is_of_the_device(offset) {
            let at = at + offset as u64;
            same(what, at, &[*expected], &[load(at)])?;
        }
    }
    Ok(())
}

fn add(share: &Share, model: &mut [u8], value: u8) {
    for (offset, byte) in model.iter_mut().enumerate() {
        if share.is_of_the_device(offset) {
            *byte = byte.wrapping_add(value);
        }
    }
}

/// Kernels that add to the device's bytes, one after another, with host functions between some; then waits and compares.
fn chain(
    setup: &Setup,
    random: &mut Random,
    stream: CUstream,
    (at, share, model): (u64, &Share, &mut [u8]),
) -> Outcome {
    let (told, heard) = channel();
    let mut functions = 0;
    for _ in 0..random.below(24) + 1 {
        let value = random.number() as u32;
        let work = Work {
            to: at + share.start as u64,
            count: share.count(),
            value,
            step: share.step as u32,
            width: share.width as u32,
            ..Work::default()
        };
        setup.kernels.launch(setup.kernels.stride, stream, &work)?;
        add(share, model, value as u8);
        if random.one_of(8) {
            functions += 1;
            let given = Box::new(Between {
                at,
                share: *share,
                expected: model.to_vec(),
                add: value as u8 | 1,
                told: told.clone(),
            });
            let function = between as HostFunction;
            let given = Box::into_raw(given).cast::<c_void>();
            must!(cuLaunchHostFunc, stream, function, given);
            add(share, model, value as u8 | 1);
        }
    }
    wait(random, stream)?;
    drop(told);
    let outcomes: Vec<Outcome> = heard.iter().collect();
    if outcomes.len() != functions {
        return Err(format!(
            "{} of {functions} host functions ran",
            outcomes.len()
        ));
    }
    outcomes.into_iter().collect::<Outcome>()?;
    check("after a chain of kernels", at, share, model)
}

/// The bytes of one of two host threads: every second `unit` bytes of the host's.
fn own(share: &Share, unit: usize, which: usize) -> Vec<usize> {
    (0..share.len)
        .filter(|offset| !share.is_of_the_device(*offset))
        .enumerate()
        .filter(|(index, _)| index / unit % 2 == which)
        .map(|(_, offset)| offset)
        .collect()
}

/// Reads or writes bytes that are one behind the other by a system call, and compares.
fn call(random: &mut Random, file: &File, at: u64, bytes: &mut [u8]) -> Outcome {
    let failed = |error: std::io::Error| format!("a call beside a kernel: {error}");
    if random.one_of(2) {
        let new = random.bytes(bytes.len());
        file.write_all_at(&new, 0).map_err(failed)?;
        file.read_exact_at(host(at, new.len()), 0).map_err(failed)?;
        bytes.copy_from_slice(&new);
    }
    file.write_all_at(host(at, bytes.len()), 0)
        .map_err(failed)?;
    let mut got = vec![0; bytes.len()];
    file.read_exact_at(&mut got, 0).map_err(failed)?;
    same("written by a call beside a kernel", at, bytes, &got)
}

/// A host thread: reads and writes its bytes until told; gives what they must be.
fn beside(
    mut random: Random,
    at: u64,
    own: Vec<usize>,
    mut model: Vec<u8>,
    done: &AtomicBool,
) -> Outcome<Vec<(usize, u8)>> {
    let file = tempfile::tempfile().map_err(|error| error.to_string())?;
    while !own.is_empty() && !done.load(Ordering::SeqCst) {
        for _ in 0..64 {
            let chosen = random.below(own.len());
            let offset = own[chosen];
            let at = at + offset as u64;
            if random.one_of(32) {
                let most = random.size(5000);
                let adjacent = own[chosen..].iter().zip(offset..).take(most);
                let len = adjacent.take_while(|(own, next)| *own == next).count();
                call(&mut random, &file, at, &mut model[offset..offset + len])?;
                continue;
            }
            same("beside a kernel", at, &[model[offset]], &[load(at)])?;
            if random.one_of(2) {
                model[offset] = random.number() as u8;
                store(at, model[offset]);
            }
        }
        if random.one_of(4) {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    Ok(own.into_iter().map(|at| (at, model[at])).collect())
}

fn once(setup: &Setup, random: &mut Random, stream: CUstream, until: Instant) -> Outcome {
    let share = Share::new(random, setup.most);
    let at = allocate(share.len)?;
    let mut model = random.bytes(share.len);
    host(at, share.len).copy_from_slice(&model);
    let done = AtomicBool::new(false);
    let unit = [1, 5, 700, 5000][random.below(4)];
    let begun = model.clone();
    let bytes = std::thread::scope(|scope| {
        let threads = [0, 1].map(|which| {
            let (random, begun) = (Random::new(random.number()), begun.clone());
            let (own, done) = (own(&share, unit, which), &done);
            scope.spawn(move || beside(random, at, own, begun, done))
        });
        let mut outcome = Ok(());
        for _ in 0..random.below(6) + 1 {
            outcome = chain(setup, random, stream, (at, &share, &mut model));
            if outcome.is_err() || Instant::now() > until {
                break;
            }
        }
        done.store(true, Ordering::SeqCst);
        let mut bytes = Vec::new();
        for thread in threads {
            bytes.extend(
                thread
                    .join()
                    .unwrap_or_else(|_| Err("a thread panicked".into()))?,
            );
        }
        outcome.map(|()| bytes)
    })?;
    for (offset, byte) in bytes {
        model[offset] = byte;
    }
    // The device sees what the threads have written, and the host all of it afterwards.
    if random.one_of(2) {
        let got = setup.device_reads(at, share.len)?;
        same("as the device reads it", at, &model, &got)?;
    }
    compare("at the end", at, &model)?;
    free(at)
}

pub fn sides(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let stream = stream()?;
    loop {
        once(setup, random, stream, until)?;
        if Instant::now() > until {
            must!(cuStreamDestroy_v2, stream);
            return Ok(());
        }
    }
}
