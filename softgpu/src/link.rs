//! The linker: merges PTX texts, leaving out declarations of symbols that another text defines.

use std::sync::Arc;

use mpsshim_api::cuda::*;
use parking_lot::Mutex;

use crate::api::{In, Out, R, Text, api};
use crate::context::live;
use crate::driver::{driver, new_handle};
use crate::image::text_of;
use crate::module::{Log, Options, file};
use crate::ptx::parse;

pub struct Link {
    log: Log,
    texts: Mutex<Vec<String>>,
    done: Mutex<Option<Vec<u8>>>,
}

// SAFETY: the log's addresses are the caller's, used in its calls only.
unsafe impl Send for Link {}
// SAFETY: as above.
unsafe impl Sync for Link {}

fn link(handle: u64) -> R<Arc<Link>> {
    driver()?.links.get(handle)
}

/// Everything of a text but its head, and but the functions that it only declares.
fn body(text: &str, is_first: bool) -> String {
    let head = [".version", ".target", ".address_size"];
    let lines = text.lines();
    let kept: Vec<&str> = lines
        .filter(|line| is_first || !head.iter().any(|word| line.trim_start().starts_with(word)))
        .collect();
    let mut text = kept.join("\n");
    while let Some(start) = text.find(".extern .func") {
        let end = text[start..]
            .find(';')
            .map_or(text.len(), |n| start + n + 1);
        text.replace_range(start..end, "");
    }
    text
}

impl Link {
    fn add(&self, kind: u32, bytes: &[u8]) -> R<()> {
        if kind >= CU_JIT_NUM_INPUT_TYPES || bytes.is_empty() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if self.done.lock().is_some() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if kind != CU_JIT_INPUT_PTX {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let bytes = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        let text = text_of(bytes.to_vec()).map_err(|refused| refused.0)?;
        // What calls a function of another text can be judged with that text only.
        if !text.contains(".extern .func")
            && let Err(error) = parse(&text)
        {
            self.log.tell(&format!("softgpu: {error}"));
            return Err(CUDA_ERROR_INVALID_PTX);
        }
        self.texts.lock().push(text);
        Ok(())
    }
    fn complete(&self) -> R<(u64, usize)> {
        let mut done = self.done.lock();
        if done.is_some() {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let texts = self.texts.lock();
        // Definitions first: this parser wants them before their use.
        let mut ordered: Vec<&String> = texts.iter().collect();
        ordered.sort_by_key(|text| text.contains(".extern .func"));
        let whole: Vec<String> = ordered
            .iter()
            .enumerate()
            .map(|(n, text)| body(text, n == 0))
            .collect();
        let mut whole = whole.join("\n");
        if let Err(error) = parse(&whole) {
            self.log.tell(&format!("softgpu: {error}"));
            return Err(CUDA_ERROR_INVALID_SOURCE);
        }
        whole.push('\0');
        let whole = done.insert(whole.into_bytes());
        Ok((whole.as_ptr() as u64, whole.len()))
    }
}

api! { TABLE;
    fn cuLinkCreate_v2(count: u32, keys: In<u32>, values: Out<u64>, out: Out<u64>) {
        live()?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let log = Options { count, keys, values }.open()?;
        let (handle, texts, done) = (new_handle(), Mutex::default(), Mutex::default());
        driver()?.links.insert(handle, Arc::new(Link { log, texts, done }));
        out.set(handle)
    }
    fn cuLinkAddData_v2(handle: u64, kind: u32, data: In<u8>, len: usize, _name: Text, _count: u32, _keys: In<u32>, _values: Out<u64>) {
        let link = link(handle)?;
        if data.is_null() || len == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        link.add(kind, &data.list(len)?)
    }
    fn cuLinkAddFile_v2(handle: u64, kind: u32, path: Text, _count: u32, _keys: In<u32>, _values: Out<u64>) {
        link(handle)?.add(kind, &file(path)?)
    }
    fn cuLinkComplete(handle: u64, out: Out<u64>, len: Out<usize>) {
        let link = link(handle)?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (address, bytes) = link.complete()?;
        len.put(bytes);
        out.set(address)
    }
    fn cuLinkDestroy(handle: u64) { driver()?.links.remove(handle).map(drop) }
}
