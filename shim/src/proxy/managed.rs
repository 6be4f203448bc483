//! Managed memory. It has its home on the device ([`pages`](mod@crate::proxy::pages)), or where that has no room is pinned
//! memory in the host arena, which devices access over the bus. Advice is recorded and moves nothing; prefetches move it.
//! The managed variables of an image are in such a block too, whose address the server puts into the code that it loads.

use mpsshim_proto::shm::PAGE;
use std::collections::BTreeMap;

use mpsshim_api::cuda::*;
use parking_lot::Mutex;

use crate::ffi::Status;
use crate::proxy::context::{self, Context};
use crate::proxy::memory;
use crate::proxy::pages;
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::Session;

pub use mpsshim_proto::message::MANAGED;

/// Advice given for some pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Advice {
    read_mostly: bool,
    preferred: Option<Place>,
    /// Devices by ordinal.
    accessed_by: Vec<i32>,
    by_host: bool,
    prefetched: Option<Place>,
}

/// A location: `CUmemLocationType` and id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    kind: u32,
    id: i32,
}

impl Place {
    /// As older entry points name it.
    fn ordinal(self) -> i32 {
        match self.kind {
            CU_MEM_LOCATION_TYPE_DEVICE => self.id,
            _ => CU_DEVICE_CPU,
        }
    }
}

/// Advice by block: the first address of the block, then the end of each part and its advice.
static ADVICE: Mutex<BTreeMap<u64, BTreeMap<u64, Advice>>> = Mutex::new(BTreeMap::new());

/// The managed block that contains an address, and its length.
pub fn block(address: u64) -> Option<(u64, u64)> {
    let (start, block) = memory::host_block(address)?;
    (block.flags & MANAGED != 0).then_some((start, block.len))
}

/// `CUDA_ERROR_INVALID_VALUE` for flags that `cuMemAllocManaged` does not take.
pub fn check_flags(flags: u32) -> Status {
    if !matches!(flags, CU_MEM_ATTACH_GLOBAL | CU_MEM_ATTACH_HOST) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

/// `cuMemAllocManaged`.
pub fn alloc(session: &Session, context: &'static Context, len: u64, flags: u32) -> Status<u64> {
    check_flags(flags)?;
    let start = match memory::managed_alloc(session, context, len, flags) {
        // It is then host memory, which devices access over the bus.
        Err(status @ (CUDA_ERROR_OUT_OF_MEMORY | CUDA_ERROR_NOT_SUPPORTED)) => {
            tracing::info!(%status, len, "managed memory is host memory");
            memory::host_alloc(session, context, len, MANAGED | flags)?
        }
        given => given?,
    };
    // A block that ended with its context left its advice behind.
    ADVICE.lock().remove(&start);
    Ok(start)
}

/// `cuMemFree` of managed memory, after the work that may use it.
pub fn free(session: &Session, address: u64) -> Status {
    match block(address) {
        Some((start, _)) if start == address => {}
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    stream::quiesce(session, None)?;
    ADVICE.lock().remove(&address);
    memory::host_give_back(session, address)
}

/// Frees the memory of an image's managed variables, after the work that may use it. `address` is 0 if there is none.
pub fn free_of_image(session: &Session, address: u64) {
    if address != 0 {
        ADVICE.lock().remove(&address);
        // Without the session, the memory goes with the process.
        let freed =
            stream::quiesce(session, None).and_then(|()| memory::host_give_back(session, address));
        if let Err(status) = freed {
            tracing::debug!(%status, "memory of managed variables was not freed");
        }
    }
}

/// The block that contains a range, and the range rounded to its pages.
fn pages(address: u64, len: u64) -> Status<(u64, u64, u64)> {
    let (start, room) = block(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if len == 0 || len > room - (address - start) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let first = (address / PAGE * PAGE).max(start);
    let last = ((address + len).div_ceil(PAGE) * PAGE).min(start + room);
    Ok((start, first, last))
}

/// Changes the advice for a range.
fn change(address: u64, len: u64, with: impl Fn(&mut Advice)) -> Status {
    let (start, first, last) = pages(address, len)?;
    let (_, room) = block(start).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let mut all = ADVICE.lock();
    let parts = all
        .entry(start)
        .or_insert_with(|| BTreeMap::from([(start + room, Advice::default())]));
    for cut in [first, last] {
        let behind = parts.range(cut + 1..).next();
        if cut > start
            && !parts.contains_key(&cut)
            && let Some(advice) = behind.map(|(_, advice)| advice.clone())
        {
            parts.insert(cut, advice);
        }
    }
    for (_, advice) in parts.range_mut(first + 1..=last) {
        with(advice);
    }
    Ok(())
}

/// The result of `of` for all pages of a range; `None` if pages differ.
fn common<T: PartialEq>(address: u64, len: u64, of: impl Fn(&Advice) -> T) -> Status<Option<T>> {
    let (start, first, last) = pages(address, len)?;
    let all = ADVICE.lock();
    let Some(parts) = all.get(&start) else {
        return Ok(Some(of(&Advice::default())));
    };
    let mut found = None;
    for (end, advice) in parts.range(first + 1..) {
        let this = of(advice);
        match &found {
            None => found = Some(this),
            Some(earlier) if *earlier == this => {}
            Some(_) => return Ok(None),
        }
        if *end >= last {
            break;
        }
    }
    Ok(found)
}

/// A location that advice and prefetches may name.
fn place(location: CUmemLocation, no_device: CUresult) -> Status<Place> {
    let id = match location.kind {
        CU_MEM_LOCATION_TYPE_DEVICE => {
            context::device(location.id).map_err(|_| no_device)?;
            location.id
        }
        CU_MEM_LOCATION_TYPE_HOST => 0,
        CU_MEM_LOCATION_TYPE_HOST_NUMA => location.id,
        CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => 0,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    Ok(Place {
        kind: location.kind,
        id,
    })
}

/// The location that an ordinal means in older entry points.
pub fn location_of(device: CUdevice) -> CUmemLocation {
    if device == CU_DEVICE_CPU {
        CUmemLocation {
            kind: CU_MEM_LOCATION_TYPE_HOST,
            id: 0,
        }
    } else {
        CUmemLocation {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: device,
        }
    }
}

/// `cuMemAdvise`.
pub fn advise(address: u64, len: u64, advice: u32, location: CUmemLocation) -> Status {
    let there = || place(location, CUDA_ERROR_INVALID_VALUE);
    match advice {
        CU_MEM_ADVISE_SET_READ_MOSTLY => change(address, len, |a| a.read_mostly = true),
        CU_MEM_ADVISE_UNSET_READ_MOSTLY => change(address, len, |a| a.read_mostly = false),
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION => {
            let there = there()?;
            change(address, len, |a| a.preferred = Some(there))
        }
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION => change(address, len, |a| a.preferred = None),
        CU_MEM_ADVISE_SET_ACCESSED_BY | CU_MEM_ADVISE_UNSET_ACCESSED_BY => {
            let (there, set) = (there()?, advice == CU_MEM_ADVISE_SET_ACCESSED_BY);
            change(address, len, |a| {
                if there.kind != CU_MEM_LOCATION_TYPE_DEVICE {
                    a.by_host = set;
                    return;
                }
                a.accessed_by.retain(|id| *id != there.id);
                if set {
                    a.accessed_by.push(there.id);
                    a.accessed_by.sort_unstable();
                }
            })
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// `cuMemPrefetchAsync`: to a device, what the host has changed is copied now; to the host, when the program has waited for
/// the work given to streams so far.
pub fn prefetch(
    session: &Session,
    stream: StreamRef,
    address: u64,
    len: u64,
    location: CUmemLocation,
) -> Status {
    let there = place(location, CUDA_ERROR_INVALID_DEVICE)?;
    change(address, len, |a| a.prefetched = Some(there))?;
    match there.kind {
        CU_MEM_LOCATION_TYPE_DEVICE => pages::prefetch::to_device(session, stream, address, len),
        _ => {
            pages::prefetch::to_host(address, len);
            Ok(())
        }
    }
}

/// `cuMemDiscardBatchAsync`: the content of a range is not used any more.
pub fn discard(session: &Session, stream: StreamRef, address: u64, len: u64) -> Status {
    check(address, len)?;
    if !stream.is_capturing() {
        pages::prefetch::discard(session, address, len);
    }
    Ok(())
}

/// Whether `[address, address + len)` is managed memory.
pub fn check(address: u64, len: u64) -> Status {
    pages(address, len).map(drop)
}

/// `cuMemRangeGetAttribute` of `words` words.
pub fn attribute(which: u32, words: usize, address: u64, len: u64) -> Status<Vec<i32>> {
    check(address, len)?;
    if which == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY && words > 0 {
        let of = |a: &Advice| (a.accessed_by.clone(), a.by_host);
        let (mut devices, by_host) = common(address, len, of)?.unwrap_or_default();
        if by_host {
            devices.push(CU_DEVICE_CPU);
        }
        devices.resize(words, CU_DEVICE_INVALID);
        return Ok(devices);
    }
    if words != 1 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let preferred = || Ok::<_, CUresult>(common(address, len, |a| a.preferred)?.flatten());
    let prefetched = || Ok::<_, CUresult>(common(address, len, |a| a.prefetched)?.flatten());
    let ordinal = |place: Option<Place>| place.map_or(CU_DEVICE_INVALID, Place::ordinal);
    let kind = |place: Option<Place>| place.map_or(0, |place| place.kind as i32);
    let id = |place: Option<Place>| place.map_or(0, |place| place.id);
    Ok(vec![match which {
        CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY => {
            (common(address, len, |a| a.read_mostly)? == Some(true)).into()
        }
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION => ordinal(preferred()?),
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE => kind(preferred()?),
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID => id(preferred()?),
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION => ordinal(prefetched()?),
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE => kind(prefetched()?),
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID => id(prefetched()?),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }])
}
