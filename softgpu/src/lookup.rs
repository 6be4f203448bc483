//! How callers find entry points and error texts.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Mutex, OnceLock, PoisonError};

use mpsshim_api::cuda::*;
use mpsshim_api::table::{self, Lookup};

use crate::api::{Entry, Out, R, Text, api, log};

const PER_THREAD_STREAM: u64 = 2;

/// All tables of exported functions.
macro_rules! tables {
    ($($subject:ident::$table:ident,)*) => {
        pub fn exported() -> &'static HashMap<&'static str, Entry> {
            static ALL: OnceLock<HashMap<&'static str, Entry>> = OnceLock::new();
            ALL.get_or_init(|| {
                let tables = [$(crate::$subject::$table,)*];
                tables.into_iter().flatten().copied().collect()
            })
        }

        #[cfg(test)]
        pub fn signatures() -> Vec<mpsshim_signatures::Named> {
            let tables = [$(crate::$subject::$table::signatures(),)*];
            tables.concat()
        }
    };
}

tables! {
    lookup::TABLE,
    device::TABLE,
    context::TABLE,
    memory::TABLE,
    module::TABLE,
    library::TABLE,
    link::TABLE,
    launch::TABLE,
    launch::TABLE_STREAMS,
    stream::TABLE,
    stream::TABLE_STREAMS,
    event::TABLE,
    event::TABLE_STREAMS,
    array::TABLE,
    array::TABLE_STREAMS,
    external::TABLE,
    graph::TABLE,
    graph_attribute::TABLE,
    green::TABLE,
    graph::TABLE_STREAMS,
    copy::COPIES,
    copy::FILLS,
    copy::PEER_COPIES,
    pool::TABLE,
    pool::TABLE_STREAMS,
}

/// The newest symbol of a base name that a program built for `version` may be given.
fn symbol(base: &str, version: u32, per_thread: bool) -> Result<&'static str, u32> {
    match table::lookup(base, version, per_thread) {
        Lookup::Found(name) if exported().contains_key(name) => Ok(name),
        Lookup::Found(_) | Lookup::NotFound => Err(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND),
        Lookup::VersionNotSufficient => Err(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT),
    }
}

fn find(name: Text, out: Out<u64>, version: i32, flags: u64, status: Out<u32>) -> R<()> {
    let name = name.get()?;
    if flags > 3 || out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match symbol(
        &name,
        u32::try_from(version).unwrap_or(0),
        flags & PER_THREAD_STREAM != 0,
    ) {
        Ok(symbol) => {
            status.put(CU_GET_PROC_ADDRESS_SUCCESS);
            out.set(exported()[symbol].0 as u64)
        }
        Err(why) => {
            log(|| format!("cuGetProcAddress: no {name} for version {version}"));
            status.put(why);
            out.set(0)?;
            Err(CUDA_ERROR_NOT_FOUND)
        }
    }
}

/// A text that stays where it is for as long as the process lives.
fn lasting(text: &str) -> u64 {
    static TEXTS: Mutex<Option<HashMap<String, CString>>> = Mutex::new(None);
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let entry = texts.get_or_insert_default().entry(text.to_owned());
    entry
        .or_insert_with(|| CString::new(text).unwrap_or_default())
        .as_ptr() as u64
}

api! { TABLE;
    fn cuGetProcAddress(name: Text, out: Out<u64>, version: i32, flags: u64) { find(name, out, version, flags, Out::NOWHERE) }
    fn cuGetProcAddress_v2(name: Text, out: Out<u64>, version: i32, flags: u64, status: Out<u32>) {
        find(name, out, version, flags, status)
    }
    fn cuGetExportTable(out: Out<u64>, _id: u64) {
        out.put(0);
        Err(CUDA_ERROR_NOT_FOUND)
    }
    fn cuGetErrorName(status: CUresult, out: Out<u64>) {
        let name = result_name(status);
        out.set(name.map_or(0, lasting))?;
        name.map(drop).ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}
