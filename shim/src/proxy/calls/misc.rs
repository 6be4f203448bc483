//! Export tables, capture modes.

use std::ffi::c_void;

use mpsshim_api::cuda::{CUDA_ERROR_NOT_FOUND, CUresult, CUuuid};

use super::entries;
use crate::ffi::{In, Out, guard};
use crate::loader::genuine;
use crate::proxy::tables;

entries! {
    cuGetExportTable(_, _) => get_export_table,
}

/// `cuGetExportTable`: the genuine driver's, except for those that refer to contexts.
pub unsafe extern "C" fn get_export_table(out: Out<*const c_void>, uuid: In<CUuuid>) -> CUresult {
    type Genuine = unsafe extern "C" fn(Out<*const c_void>, In<CUuuid>) -> CUresult;
    guard(|| {
        out.required()?;
        let name = uuid.get()?;
        tracing::debug!("export table {}", table_name(&name));
        if let Some(own) = tables::own(&name) {
            return out.set(own);
        }
        let address = genuine::symbol("cuGetExportTable").ok_or(CUDA_ERROR_NOT_FOUND)?;
        // SAFETY: the driver's function of this name has this signature.
        let genuine = unsafe { std::mem::transmute::<*const (), Genuine>(address) };
        // SAFETY: the program's arguments, unchanged.
        unsafe { genuine(out, uuid) }.ok()?;
        // SAFETY: the table that the driver has just returned under this name.
        match unsafe { tables::patched(&name, out.get()?) } {
            Some(patched) => out.set(patched),
            None => Ok(()),
        }
    })
}

fn table_name(uuid: &CUuuid) -> String {
    uuid.0.iter().map(|byte| format!("{byte:02x}")).collect()
}
