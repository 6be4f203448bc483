//! `-a`: creates and changes servers as a file describes them.

use super::modules::{chosen_devices, find_device};
use super::{Daemon, DaemonError};
use crate::server_file::{
    DEVICES, DeviceTable, FILE_LIMIT, MEMORY, Mistake, Mistakes, PARTITIONS, PartitionEntry,
    ServerEntry, ServerFile, THREADS, UID, UUID,
};
use crate::servers::{OwnLimits, Target, Wrong, without_device};
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::named::{DEFAULT_NAMESPACE, Named, NamedDevice};
use mpsshim_model::partitions::Partitions;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::unistd::geteuid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Reads the text of a file that mps-control has sent: only memory that cannot change, so that the daemon never waits for
/// a file system.
///
/// # Errors
/// It is other than that, in words.
pub(super) fn read_sent(descriptor: OwnedFd) -> Result<String, String> {
    let file = File::from(descriptor);
    let seals = fcntl(&file, FcntlArg::F_GET_SEALS).unwrap_or(0);
    let needed = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SHRINK;
    if !SealFlag::from_bits_truncate(seals).contains(needed) {
        return Err("-a: the file was not sent as sealed memory".to_owned());
    }
    let failed = |error: std::io::Error| format!("-a: cannot read the file that was sent: {error}");
    let len = file.metadata().map_err(failed)?.len();
    let len = usize::try_from(len).ok().filter(|len| *len <= FILE_LIMIT);
    let len = len.ok_or_else(|| format!("-a: a file may have {FILE_LIMIT} bytes"))?;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    String::from_utf8(bytes).map_err(|_| "-a: the file is not text in UTF-8".to_owned())
}

impl Daemon {
    /// Applies a file before the daemon serves.
    ///
    /// # Errors
    /// The file has mistakes, or the devices are not found; no server has been created then.
    pub fn apply_at_start(&mut self, file: &ServerFile) -> Result<(), DaemonError> {
        let found = self.devices.find_now(self.servers.launcher());
        match found {
            Ok(Some(_)) => {}
            Ok(None) => return Err(DaemonError::Devices(self.devices.failure().to_owned())),
            Err(error) => return Err(DaemonError::Devices(error.to_string())),
        }
        Ok(self.apply(file)?)
    }

    /// Applies a file; the devices are known.
    ///
    /// # Errors
    /// All mistakes of the file; nothing is changed then.
    pub(super) fn apply(&mut self, file: &ServerFile) -> Result<(), Mistakes> {
        let mut mistakes = Vec::new();
        let mut targets = Vec::new();
        let mut new = 0;
        for entry in &file.servers {
            let mut target = self.target(entry, &mut new, &mut mistakes);
            let before: &[Target] = &targets;
            target.partitions = self.partitions_of(entry, &target.named, before, &mut mistakes);
            targets.push(target);
        }
        let failed = |all| Mistakes {
            path: file.path.clone(),
            all,
        };
        if !mistakes.is_empty() {
            return Err(failed(mistakes));
        }
        let applied = self.servers.apply(targets, self.directory.folder());
        applied.map_err(|(name, why)| {
            let mut entries = file.servers.iter().filter(|entry| entry.name == name);
            let mistake = entries.next().map(|entry| entry.place.mistake("", why));
            failed(mistake.into_iter().collect())
        })?;
        tracing::info!("{}: {} servers applied", file.path, file.servers.len());
        Ok(())
    }

    /// The server of an entry. `new`: how many servers are to be created before it.
    fn target(&self, entry: &ServerEntry, new: &mut usize, mistakes: &mut Vec<Mistake>) -> Target {
        let name = &entry.name;
        let place = &entry.place;
        let mut note = |key: &str, checked: Result<(), String>| {
            let wrong = checked.err().map(|why| place.mistake(key, why));
            mistakes.extend(wrong);
        };
        let mut named = Named {
            name: name.clone(),
            devices: None,
            namespaces: BTreeMap::new(),
        };
        match self.devices_of(entry) {
            Ok(devices) => named.devices = devices,
            Err(why) => note(DEVICES, Err(why)),
        }
        match self.servers.defined(name) {
            None => {
                note("", self.servers.check_new_server(name, *new));
                *new += 1;
                let uid = entry.uid.unwrap_or_else(|| geteuid().as_raw());
                note(UID, self.servers.check_user(uid));
                let is_list = entry.devices.is_some();
                note(DEVICES, self.servers.check_new_devices(is_list));
                note(DEVICES, self.check_shared(&named));
            }
            Some(found) => {
                if entry.devices.is_some() && named.devices != found.named.devices {
                    let why = format!(
                        "the server {name} has other devices; delete it first (server delete {name})"
                    );
                    note(DEVICES, Err(why));
                }
                named.devices.clone_from(&found.named.devices);
                let uid = entry.uid.filter(|uid| *uid != found.uid);
                if let Some(uid) = uid {
                    note(UID, self.servers.check_new_user(name, uid));
                }
            }
        }
        let own = self.own_limits(Some(&named), &entry.limits);
        let own = own.unwrap_or_else(|why| {
            note(MEMORY, Err(why));
            OwnLimits::default()
        });
        let mut target = Target {
            named,
            uid: entry.uid,
            own,
            namespaces: Vec::new(),
            partitions: Partitions::default(),
        };
        for space in &entry.namespaces {
            if space.name == DEFAULT_NAMESPACE {
                let why = "the namespace default has the limits of its server, and none of its own";
                mistakes.push(space.place.mistake("", why));
                continue;
            }
            match self.own_limits(Some(&target.named), &space.limits) {
                Ok(own) => target.namespaces.push((space.name.clone(), own)),
                Err(why) => mistakes.push(space.place.mistake(MEMORY, why)),
            }
        }
        for (name, of, why) in self.servers.check_namespaces(&target) {
            let key = match of {
                Wrong::Name => "",
                Wrong::Threads => THREADS,
                Wrong::Memory => MEMORY,
            };
            let mut spaces = entry.namespaces.iter().filter(|space| space.name == name);
            mistakes.extend(spaces.next().map(|space| space.place.mistake(key, why)));
        }
        target
    }

    /// The static partitions of a new server. Those of an existing one are compared with its own. `before`: the servers
    /// before it in the file.
    fn partitions_of(
        &self,
        entry: &ServerEntry,
        named: &Named,
        before: &[Target],
        mistakes: &mut Vec<Mistake>,
    ) -> Partitions {
        let mut partitions = Partitions::default();
        let mut uuids = BTreeSet::new();
        for table in &entry.device_tables {
            let device = self.device_of(table, named).and_then(|device| {
                let is_new = uuids.insert(&device.uuid);
                let twice = || format!("device {} is given twice", table.uuid);
                is_new.then_some(device).ok_or_else(twice)
            });
            let device = match device {
                Ok(device) => device,
                Err(why) => {
                    mistakes.push(table.place.mistake(UUID, why));
                    continue;
                }
            };
            let Some(list) = &table.partitions else {
                continue;
            };
            let checked = match self.servers.defined(&entry.name) {
                Some(_) => self.compare_partitions(&entry.name, device, list),
                None => self.add_partitions(&mut partitions, device, list, before),
            };
            let wrong = checked.err();
            mistakes.extend(wrong.map(|why| table.place.mistake(PARTITIONS, why)));
        }
        partitions
    }

    /// The device of a table, which must be one of the server's.
    fn device_of(&self, table: &DeviceTable, named: &Named) -> Result<&DeviceInfo, String> {
        let known = self.devices.known().unwrap_or_default();
        let ordinal = find_device(known, &table.uuid)?;
        match named.own_ordinal(ordinal) {
            Some(_) => Ok(&known[ordinal]),
            None => Err(without_device(&named.name, &table.uuid)),
        }
    }

    /// Adds the partitions of a device to those of a new server.
    fn add_partitions(
        &self,
        partitions: &mut Partitions,
        device: &DeviceInfo,
        list: &[PartitionEntry],
        before: &[Target],
    ) -> Result<(), String> {
        if !list.is_empty() {
            self.servers.partitions()?;
        }
        let uuid = &device.uuid;
        let is_taken = |id| {
            let in_file = before.iter().any(|target| target.partitions.has(uuid, id));
            in_file || self.servers.is_partition(uuid, id)
        };
        for PartitionEntry { name, chunks } in list {
            let id = partitions.add(device, *chunks, is_taken)?;
            if let Some(name) = name {
                self.servers.check_new_partition(name)?;
                partitions.set_name(name, uuid, id)?;
            }
        }
        Ok(())
    }

    /// Whether an existing server has these partitions of a device.
    fn compare_partitions(
        &self,
        server: &str,
        device: &DeviceInfo,
        list: &[PartitionEntry],
    ) -> Result<(), String> {
        if !list.is_empty() {
            self.servers.partitions()?;
        }
        let mut wanted: Vec<_> = list
            .iter()
            .map(|one| (one.name.as_deref(), one.chunks))
            .collect();
        wanted.sort_unstable();
        match self.servers.partition_sizes(server, &device.uuid) == wanted {
            true => Ok(()),
            false => Err(format!(
                "the server {server} has other partitions of this device; change them with sm-partition create and delete, \
                 or delete the server first (server delete {server})"
            )),
        }
    }

    fn devices_of(&self, entry: &ServerEntry) -> Result<Option<Vec<NamedDevice>>, String> {
        let chosen = chosen_devices(
            self.devices.known().unwrap_or_default(),
            entry.devices.as_deref(),
        )?;
        let device = |(ordinal, info): (usize, &DeviceInfo)| NamedDevice {
            ordinal,
            uuid: info.uuid.clone(),
        };
        Ok(chosen.map(|chosen| chosen.into_iter().map(device).collect()))
    }
}

/// Text as sealed memory, to be sent to the daemon.
///
/// # Errors
/// Those of the system calls.
pub fn as_sealed_memory(text: &str) -> std::io::Result<File> {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(c"mpsshim-servers", flags)?);
    file.write_all_at(text.as_bytes(), 0)?;
    let seals = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file)
}
