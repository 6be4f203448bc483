//! NVML's lists of processes, and how clients come into them.

use std::ffi::c_uint;

use super::clients::Client;

/// `NVML_VALUE_NOT_AVAILABLE`
const NOT_AVAILABLE: u64 = u64::MAX;
/// Of a process on a device without MIG.
const NO_INSTANCE: c_uint = c_uint::MAX;

/// `nvmlProcessInfo_v1_t`
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct ProcessV1 {
    pid: c_uint,
    used: u64,
}

/// `nvmlProcessInfo_t`, of versions 2 and 3.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Process {
    pid: c_uint,
    /// Bytes.
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlProcessDetail_v1_t`
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Detail {
    process: Process,
    protected: u64,
}

/// `nvmlProcessDetailList_v1_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DetailList {
    pub version: c_uint,
    pub mode: c_uint,
    pub count: c_uint,
    pub entries: *mut Detail,
}

impl DetailList {
    /// `nvmlProcessDetailList_v1`
    const VERSION: c_uint = size_of::<DetailList>() as c_uint | 1 << 24;
    const COMPUTE: c_uint = 0;
    const MPS: c_uint = 2;

    /// Whether this is the version known here, and clients are among the processes.
    pub fn has_clients(&self) -> bool {
        self.version == Self::VERSION && matches!(self.mode, Self::COMPUTE | Self::MPS)
    }
}

/// `nvmlProcessUtilizationSample_t`
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Sample {
    pid: c_uint,
    /// Microseconds since 1970.
    time: u64,
    /// Percent.
    multiprocessors: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

/// An entry of a list of processes.
pub trait Entry: Copy + Default {
    fn of(process: Process) -> Self;
    fn process(&self) -> Process;
    fn set_used(&mut self, used: u64);
}

impl Entry for ProcessV1 {
    fn of(Process { pid, used, .. }: Process) -> ProcessV1 {
        ProcessV1 { pid, used }
    }

    fn process(&self) -> Process {
        Process {
            pid: self.pid,
            used: self.used,
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
        }
    }

    fn set_used(&mut self, used: u64) {
        self.used = used;
    }
}

impl Entry for Process {
    fn of(process: Process) -> Process {
        process
    }

    fn process(&self) -> Process {
        *self
    }

    fn set_used(&mut self, used: u64) {
        self.used = used;
    }
}

impl Entry for Detail {
    fn of(process: Process) -> Detail {
        Detail {
            process,
            protected: 0,
        }
    }

    fn process(&self) -> Process {
        self.process
    }

    fn set_used(&mut self, used: u64) {
        self.process.used = used;
    }
}

/// A genuine list with the clients behind it, whose memory is taken off their servers'.
pub fn processes<T: Entry>(mut genuine: Vec<T>, clients: &[Client]) -> Vec<T> {
    let listed: Vec<Process> = genuine.iter().map(Entry::process).collect();
    let is_listed = |pid: u32| listed.iter().any(|process| process.pid == pid);
    for client in clients.iter().filter(|client| !is_listed(client.pid)) {
        let mut instances = (NO_INSTANCE, NO_INSTANCE);
        let of_server = |entry: &&mut T| entry.process().pid == client.server;
        if let Some(server) = genuine[..listed.len()].iter_mut().find(of_server) {
            let found = server.process();
            instances = (found.gpu_instance, found.compute_instance);
            if found.used != NOT_AVAILABLE {
                server.set_used(found.used.saturating_sub(client.memory));
            }
        }
        genuine.push(T::of(Process {
            pid: client.pid,
            used: client.memory,
            gpu_instance: instances.0,
            compute_instance: instances.1,
        }));
    }
    genuine
}

/// The same of samples: a client's is its share of the device at `time`, unless that is not after `last_seen`.
pub fn samples(
    mut genuine: Vec<Sample>,
    clients: &[Client],
    time: u64,
    last_seen: u64,
) -> Vec<Sample> {
    let listed: Vec<c_uint> = genuine.iter().map(|sample| sample.pid).collect();
    for client in clients
        .iter()
        .filter(|client| !listed.contains(&client.pid))
    {
        let Some(share) = client.share else {
            continue;
        };
        let share = share.round().clamp(0.0, 100.0) as c_uint;
        let of_server = |sample: &&mut Sample| sample.pid == client.server;
        for server in genuine[..listed.len()].iter_mut().filter(of_server) {
            server.multiprocessors = server.multiprocessors.saturating_sub(share);
        }
        if time > last_seen {
            genuine.push(Sample {
                pid: client.pid,
                time,
                multiprocessors: share,
                ..Sample::default()
            });
        }
    }
    genuine
}

#[cfg(test)]
mod tests {
    use super::super::clients::tests::client;
    use super::*;

    fn process(pid: u32, used: u64, instance: u32) -> Process {
        Process {
            pid,
            used,
            gpu_instance: instance,
            compute_instance: instance,
        }
    }

    #[test]
    fn structs_are_nvmls() {
        assert_eq!(size_of::<ProcessV1>(), 16);
        assert_eq!(size_of::<Process>(), 24);
        assert_eq!(size_of::<Detail>(), 32);
        assert_eq!(size_of::<Sample>(), 32);
        // nvml.h has this value.
        assert_eq!(DetailList::VERSION, 0x0100_0018);
    }

    #[test]
    fn clients_memory_is_taken_off_their_servers() {
        let genuine = vec![process(10, 100, 3), process(7, 100, NO_INSTANCE)];
        let clients = [client(20, 30, None), client(21, 50, None)];
        let expected = [
            process(10, 20, 3),
            process(7, 100, NO_INSTANCE),
            process(20, 30, 3),
            process(21, 50, 3),
        ];
        assert_eq!(processes(genuine, &clients), expected);
        // Never below zero, nor from a value that is not known.
        let less = vec![process(10, 40, 3)];
        assert_eq!(processes(less, &clients)[0].used, 0);
        let unknown = vec![process(10, NOT_AVAILABLE, 3)];
        assert_eq!(processes(unknown, &clients)[0].used, NOT_AVAILABLE);
        // A list without the server.
        assert_eq!(
            processes(Vec::<Process>::new(), &clients[..1]),
            [process(20, 30, NO_INSTANCE)]
        );
        let old = vec![ProcessV1 { pid: 10, used: 31 }];
        let expected = [(10, 1), (20, 30)].map(|(pid, used)| ProcessV1 { pid, used });
        assert_eq!(processes(old, &clients[..1]), expected);
    }

    #[test]
    fn no_process_is_listed_twice() {
        let genuine = vec![process(10, 100, 3), process(20, 5, 3)];
        let clients = [client(20, 30, None)];
        assert_eq!(processes(genuine.clone(), &clients), genuine);
    }

    #[test]
    fn shares_are_taken_off_the_servers_samples() {
        let sample = |pid, time, multiprocessors| Sample {
            pid,
            time,
            multiprocessors,
            ..Sample::default()
        };
        let genuine = vec![sample(10, 1, 90), sample(10, 2, 50)];
        let clients = [client(20, 0, Some(59.6)), client(21, 0, None)];
        assert_eq!(
            samples(genuine.clone(), &clients, 5, 4),
            [sample(10, 1, 30), sample(10, 2, 0), sample(20, 5, 60)]
        );
        assert_eq!(samples(genuine, &clients, 5, 5).len(), 2);
    }
}
