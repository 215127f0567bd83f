//! Measures how fast layers are unpacked: `cargo test --release -p nacelle-image --test store speed -- --ignored --nocapture`.

use crate::common::{Packing, Tar, image, store_config, write_layout};
use nacelle_image::ImageStore;
use std::time::Instant;

/// The number of loads of each image, of which the fastest and the median count.
const LOADS: usize = 7;

/// Returns the content of a layer of about this many bytes: files of 64 KiB that compress to about a third.
fn content(bytes: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        state >> 33
    };
    let words: Vec<Vec<u8>> =
        (0..4096).map(|_| (0..4 + next() % 9).map(|_| b'a' + (next() % 26) as u8).collect()).collect();
    let mut tar = Tar::new();
    for file in 0..bytes.div_ceil(64 << 10) {
        let mut text = Vec::with_capacity(65 << 10);
        while text.len() < 64 << 10 {
            text.extend_from_slice(&words[(next() % 4096) as usize]);
            text.push(b' ');
        }
        tar = tar.file(&format!("d{}/{file}", file / 100), 0o644, &text);
    }
    tar.done()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures; takes minutes"]
async fn layers_are_unpacked() {
    for (name, bytes, packing) in [
        ("gzip", 200 << 20, Packing::Gzip),
        ("zstd", 200 << 20, Packing::Zstd),
        ("plain", 200 << 20, Packing::Plain),
        ("small gzip", 100 << 10, Packing::Gzip),
    ] {
        let directory = tempfile::tempdir().unwrap();
        write_layout(&image(&[(content(bytes), packing)]), &directory.path().join("layout"), "speed:1");
        let mut times = Vec::new();
        for load in 0..LOADS {
            let place = directory.path().join(load.to_string());
            let store = ImageStore::open(&place, store_config()).unwrap();
            let since = Instant::now();
            store.load(&directory.path().join("layout"), None).await.unwrap();
            times.push(since.elapsed().as_micros());
            drop(store);
            std::fs::remove_dir_all(&place).unwrap();
        }
        times.sort_unstable();
        println!("{name}: fastest {} us, median {} us", times[0], times[LOADS / 2]);
    }
}
