//! Attributes of kernel nodes. They are stored but have no effect: nodes run one after the other, without priorities.

use std::collections::HashMap;

use mpsshim_api::cuda::*;

use crate::api::{In, Out, R, api};
use crate::graph::with_attributes;

/// `CUlaunchAttributeValue`.
type Value = [u64; 8];

/// What was set, by id; all else is zero.
pub type Attributes = HashMap<u32, Value>;

/// Those that a node may have here.
fn known(id: u32) -> R<u32> {
    let known = matches!(
        id,
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            | CU_LAUNCH_ATTRIBUTE_PRIORITY
            | CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    );
    known.then_some(id).ok_or(CUDA_ERROR_INVALID_VALUE)
}

api! { TABLE;
    fn cuGraphKernelNodeGetAttribute(of: u64, id: u32, out: Out<Value>) {
        let value = with_attributes(of, |attributes| attributes.get(&id).copied())?;
        known(id)?;
        out.set(value.unwrap_or_default())
    }
    fn cuGraphKernelNodeSetAttribute(of: u64, id: u32, value: In<Value>) {
        let (id, value) = (known(id)?, value.get(0)?);
        // A grid whose blocks wait for each other would have to run all at once.
        if id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && value[0] as u32 != 0 { return Err(CUDA_ERROR_NOT_SUPPORTED); }
        with_attributes(of, |attributes| attributes.insert(id, value)).map(drop)
    }
    fn cuGraphKernelNodeCopyAttributes(to: u64, from: u64) {
        let attributes = with_attributes(from, |attributes| attributes.clone())?;
        with_attributes(to, |own| *own = attributes)
    }
}
