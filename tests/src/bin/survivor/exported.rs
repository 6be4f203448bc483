//! Physical memory that another process maps (`cuMemExportToShareableHandle`, `cuMemImportFromShareableHandle`).

use super::Status;
use mpsshim_api::cuda::*;
use mpsshim_proto::shm;
use mpsshim_tests::cu;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

const LEN: usize = 4 << 20;
const WORDS: usize = LEN / 4;

const DEVICE: CUmemLocation = CUmemLocation {
    kind: CU_MEM_LOCATION_TYPE_DEVICE,
    id: 0,
};

/// Memory of this process, or of another one, and where it is mapped.
pub struct Exported {
    handle: CUmemGenericAllocationHandle,
    places: Vec<CUdeviceptr>,
}

/// New memory that can be exported.
fn created() -> Status<CUmemGenericAllocationHandle> {
    let properties = CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: DEVICE,
        ..CUmemAllocationProp::default()
    };
    let mut handle = CUmemGenericAllocationHandle::NULL;
    cu!(cuMemCreate, &mut handle, LEN, &raw const properties, 0u64).ok()?;
    Ok(handle)
}

fn export(handle: CUmemGenericAllocationHandle) -> Status<OwnedFd> {
    let mut raw = -1;
    cu!(
        cuMemExportToShareableHandle,
        (&raw mut raw).cast::<std::ffi::c_void>(),
        handle,
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        0u64
    )
    .ok()?;
    // SAFETY: a new descriptor of ours.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

impl Exported {
    /// New memory, whose descriptor each process gets that connects to a socket with this path.
    ///
    /// # Errors
    /// A call's status.
    pub fn new(path: &str) -> Status<Exported> {
        let handle = created()?;
        let descriptor = export(handle)?;
        let listener = UnixListener::bind(path).expect("a socket");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                shm::send_packet(stream.as_fd(), b"m", &[descriptor.as_fd()]).expect("sent");
            }
        });
        Exported::mapped(handle)
    }

    /// Memory of the process that listens at this path.
    ///
    /// # Errors
    /// A call's status.
    pub fn import(path: &str) -> Status<Exported> {
        let stream = UnixStream::connect(path).expect("a listener");
        let (_, descriptors) =
            shm::recv_packet(stream.as_fd(), &mut [0], true).expect("a descriptor");
        let mut handle = CUmemGenericAllocationHandle::NULL;
        let number = descriptors[0].as_raw_fd() as usize;
        let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        cu!(cuMemImportFromShareableHandle, &mut handle, number, kind).ok()?;
        Exported::mapped(handle)
    }

    fn mapped(handle: CUmemGenericAllocationHandle) -> Status<Exported> {
        let mut exported = Exported {
            handle,
            places: Vec::new(),
        };
        exported.map()?;
        Ok(exported)
    }

    /// Maps it once more.
    fn map(&mut self) -> Status {
        let mut at: CUdeviceptr = 0;
        cu!(cuMemAddressReserve, &mut at, LEN, 0usize, 0u64, 0u64).ok()?;
        cu!(cuMemMap, at, LEN, 0usize, self.handle, 0u64).ok()?;
        let access = CUmemAccessDesc {
            location: DEVICE,
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        cu!(cuMemSetAccess, at, LEN, &raw const access, 1usize).ok()?;
        self.places.push(at);
        Ok(())
    }

    /// Releases the handle, gets another one from the first mapping, and maps the memory with that once more.
    ///
    /// # Errors
    /// A call's status.
    pub fn retain(&mut self) -> Status {
        cu!(cuMemRelease, self.handle).ok()?;
        let at = self.places[0] as usize;
        cu!(cuMemRetainAllocationHandle, &mut self.handle, at).ok()?;
        self.map()
    }

    /// Writes a value everywhere, by the last mapping.
    ///
    /// # Errors
    /// A call's status.
    pub fn write(&self, value: u32) -> Status {
        let at = self.places[self.places.len() - 1];
        cu!(cuMemsetD32_v2, at, value, WORDS).ok()?;
        cu!(cuCtxSynchronize).ok()
    }

    /// Removes its mappings. The handle stays.
    fn unmap(&self) -> Status {
        for place in &self.places {
            cu!(cuMemUnmap, *place, LEN).ok()?;
            cu!(cuMemAddressFree, *place, LEN).ok()?;
        }
        Ok(())
    }

    /// The value that is everywhere, by each mapping; `None` if there are several.
    ///
    /// # Errors
    /// A call's status.
    pub fn read(&self) -> Status<Option<u32>> {
        let mut found = vec![0u32; WORDS * self.places.len()];
        for (part, at) in found.chunks_exact_mut(WORDS).zip(&self.places) {
            cu!(cuMemcpyDtoH_v2, part.as_mut_ptr(), *at, LEN).ok()?;
        }
        let first = found[0];
        Ok(found.iter().all(|word| *word == first).then_some(first))
    }
}

/// Memory that is mapped nowhere between two rounds: the program has a handle only that it once retained from a mapping.
pub struct Held {
    handle: CUmemGenericAllocationHandle,
    round: u32,
}

impl Held {
    /// # Errors
    /// A call's status.
    pub fn new() -> Status<Held> {
        let memory = Exported::mapped(created()?)?;
        memory.write(0)?;
        let mut handle = CUmemGenericAllocationHandle::NULL;
        let at = memory.places[0] as usize;
        cu!(cuMemRetainAllocationHandle, &mut handle, at).ok()?;
        memory.unmap()?;
        cu!(cuMemRelease, memory.handle).ok()?;
        Ok(Held { handle, round: 0 })
    }

    /// Whether the memory has the value of the last round, also by a descriptor. It gets the next one. The number of the round,
    /// or `None`: it has another value.
    ///
    /// # Errors
    /// A call's status.
    pub fn round(&mut self) -> Status<Option<u32>> {
        let mut again = CUmemGenericAllocationHandle::NULL;
        let descriptor = export(self.handle)?;
        let number = descriptor.as_raw_fd() as usize;
        let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        cu!(cuMemImportFromShareableHandle, &mut again, number, kind).ok()?;
        let (mine, imported) = (Exported::mapped(self.handle)?, Exported::mapped(again)?);
        let before = [mine.read()?, imported.read()?];
        let is_right = before == [Some(self.round); 2];
        self.round += 1;
        imported.write(self.round)?;
        let is_same = mine.read()? == Some(self.round);
        mine.unmap()?;
        imported.unmap()?;
        cu!(cuMemRelease, imported.handle).ok()?;
        Ok((is_right && is_same).then_some(self.round))
    }
}
