//! Children come and go; they use ordinary memory only.

use super::turns::World;
use super::*;
use std::ffi::CStr;

/// A child that computes in ordinary memory, lives for some time, and ends with this status.
fn forked(random: &mut Random) -> Outcome<(libc::pid_t, i32)> {
    let ordinary = random.bytes(10_000);
    let expected = ordinary
        .iter()
        .fold(0u8, |sum, byte| sum.wrapping_add(*byte)) as i32;
    let pause = libc::timespec {
        tv_sec: 0,
        tv_nsec: random.below(3_000_000) as i64,
    };
    // SAFETY: the child uses its copies of the variables above, and ends without the parent's exit handlers.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: waits, without a lock that another thread may have had.
        unsafe { libc::nanosleep(&raw const pause, null_mut()) };
        let sum = ordinary
            .iter()
            .fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        // SAFETY: as above.
        unsafe { libc::_exit(sum.into()) };
    }
    match child {
        -1 => Err("fork failed".into()),
        _ => Ok((child, expected)),
    }
}

/// Another program, with a word of its own as its only argument.
fn spawned() -> Outcome<(libc::pid_t, i32)> {
    const SHELL: &CStr = c"/bin/sh";
    let mut arguments = [
        SHELL.as_ptr().cast_mut(),
        c"-c".as_ptr().cast_mut(),
        c"exit 7".as_ptr().cast_mut(),
        null_mut(),
    ];
    // A child with the shim would be a client as well.
    let mut environment = [c"PATH=/usr/bin:/bin".as_ptr().cast_mut(), null_mut()];
    let mut child: libc::pid_t = 0;
    // SAFETY: NUL-ended strings, arrays that end with NULL.
    let status = unsafe {
        libc::posix_spawn(
            &raw mut child,
            SHELL.as_ptr(),
            std::ptr::null(),
            std::ptr::null(),
            arguments.as_mut_ptr(),
            environment.as_mut_ptr(),
        )
    };
    match status {
        0 => Ok((child, 7)),
        number => Err(format!("posix_spawn: {number}")),
    }
}

fn reap((child, expected): (libc::pid_t, i32)) -> Outcome {
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    let found = unsafe { libc::waitpid(child, &raw mut status, 0) };
    match found == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == expected {
        true => Ok(()),
        false => Err(format!(
            "a child's wait status is {status:#x}, {expected} was expected"
        )),
    }
}

pub fn forks(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let mut world = World::new(setup, random.number(), (setup.most / 16).max(16))?;
    loop {
        let child = match random.below(3) {
            0 => spawned()?,
            _ => forked(random)?,
        };
        for _ in 0..random.below(40) {
            world.turn()?;
        }
        reap(child)?;
        for _ in 0..random.below(10) {
            world.turn()?;
        }
        if Instant::now() > until {
            return world.end();
        }
    }
}
