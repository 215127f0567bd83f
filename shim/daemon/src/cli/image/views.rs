//! Defines the results of the commands for images.

use crate::cli::ExitStatus;
use crate::cli::output::{OutputArgument, TableView};
use crate::cli::table::format_table;
use crate::cli::units::format_bytes;
use nacelle_image::ImageRecord;
use nacelle_proto::{cri, node};
use serde::Serialize;

/// The number of characters of an image's id that tables show: the name of the digest and 12 of its digits.
const SHORT: usize = 19;

/// A loaded image.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct LoadedView {
    pub(super) id: String,
    pub(super) names: Vec<String>,
}

impl TableView for Vec<LoadedView> {
    fn table(&self) -> String {
        let lines = |image: &LoadedView| match image.names.as_slice() {
            [] => format!("{}\n", image.id),
            names => names.iter().map(|name| format!("{name} {}\n", image.id)).collect(),
        };
        self.iter().map(lines).collect()
    }
}

/// A pulled image.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct PulledView {
    pub(super) id: String,
}

impl TableView for PulledView {
    fn table(&self) -> String {
        format!("{}\n", self.id)
    }
}

/// An image of the store.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct ImageView {
    id: String,
    /// Layers that other images share count in full.
    size_bytes: u64,
    tags: Vec<String>,
    digests: Vec<String>,
    /// The garbage collection keeps the image.
    pinned: bool,
}

impl From<cri::Image> for ImageView {
    fn from(image: cri::Image) -> ImageView {
        ImageView {
            id: image.id,
            size_bytes: image.size,
            tags: image.repo_tags,
            digests: image.repo_digests,
            pinned: image.pinned,
        }
    }
}

impl From<ImageRecord> for ImageView {
    fn from(image: ImageRecord) -> ImageView {
        ImageView {
            id: image.id.to_string(),
            size_bytes: image.size,
            tags: image.repo_tags,
            digests: image.repo_digests,
            pinned: image.pinned,
        }
    }
}

impl TableView for Vec<ImageView> {
    fn table(&self) -> String {
        let mut rows = vec![["IMAGE ID", "SIZE", "NAMES"].map(str::to_owned)];
        rows.extend(self.iter().map(|image| {
            let names = if image.tags.is_empty() { &image.digests } else { &image.tags };
            let id = image.id.get(..SHORT).unwrap_or(&image.id).to_owned();
            [id, format_bytes(image.size_bytes), names.join(" ")]
        }));
        format_table(&rows)
    }
}

/// The result of a verification.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct VerificationView {
    images: u64,
    files: u64,
    read_bytes: u64,
    verity_files: u64,
    damaged: Vec<DamageView>,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct DamageView {
    image: String,
    names: Vec<String>,
    file: String,
    damage: String,
    repaired: bool,
    /// `None`: it is repaired, or no repair was tried.
    repair_error: Option<String>,
}

impl VerificationView {
    pub(super) fn new(report: node::VerifyImagesResponse) -> VerificationView {
        let damaged = report.damaged.into_iter().map(|damage| DamageView {
            image: damage.image,
            names: damage.names,
            file: damage.path,
            damage: damage.damage,
            repaired: damage.repaired,
            repair_error: Some(damage.repair_error).filter(|error| !error.is_empty()),
        });
        let damaged = damaged.collect();
        VerificationView {
            images: report.images,
            files: report.files,
            read_bytes: report.bytes,
            verity_files: report.verity_files,
            damaged,
        }
    }

    /// Prints the result. The status is success if all damage was repaired.
    pub(super) fn print(&self, output: OutputArgument) -> anyhow::Result<ExitStatus> {
        output.print(self)?;
        Ok(self.status())
    }

    fn status(&self) -> ExitStatus {
        ExitStatus::of(self.damaged.iter().all(|damage| damage.repaired))
    }
}

impl TableView for VerificationView {
    /// Returns a table of the damaged files, unless there are none, and a summary.
    fn table(&self) -> String {
        let mut text = String::new();
        if !self.damaged.is_empty() {
            let mut rows = vec![["IMAGE", "FILE", "DAMAGE", "STATE"].map(str::to_owned)];
            rows.extend(self.damaged.iter().map(|damage| {
                let state = match (damage.repaired, &damage.repair_error) {
                    (true, _) => "repaired".to_owned(),
                    (false, None) => "damaged".to_owned(),
                    (false, Some(error)) => format!("not repaired: {error}"),
                };
                let image = damage.names.first().unwrap_or(&damage.image).clone();
                [image, damage.file.clone(), damage.damage.clone(), state]
            }));
            text += &format_table(&rows);
            text.push('\n');
        }
        let repaired = self.damaged.iter().filter(|damage| damage.repaired).count();
        let verity = match self.verity_files {
            0 => String::new(),
            files => format!(" ({files} with fs-verity)"),
        };
        text +=
            &format!("{} images, {} files{verity}, {} read: ", self.images, self.files, format_bytes(self.read_bytes));
        text += &match (self.damaged.len(), repaired) {
            (0, _) => "no damage\n".to_owned(),
            (damaged, repaired) => format!("{damaged} damaged, {repaired} of them repaired\n"),
        };
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn damage(image: &str, repaired: bool, repair_error: &str) -> node::ImageDamage {
        let names = vec![format!("r.test/{image}:1")];
        let (path, damage) = (format!("/images/layers/{image}.blob"), "is missing".to_owned());
        node::ImageDamage { image: image.into(), names, path, damage, repaired, repair_error: repair_error.into() }
    }

    fn report(damaged: Vec<node::ImageDamage>) -> VerificationView {
        let (images, files, bytes, verity_files) = (2, 9, 5 << 20, 0);
        VerificationView::new(node::VerifyImagesResponse { images, files, bytes, damaged, verity_files })
    }

    #[test]
    fn a_verification_is_a_table_and_a_summary() {
        let good = report(vec![]);
        assert_eq!(good.table(), "2 images, 9 files, 5.0 MiB read: no damage\n");
        assert_eq!(good.status(), ExitStatus::Success);
        let sealed = VerificationView { verity_files: 7, ..report(vec![]) };
        assert_eq!(sealed.table(), "2 images, 9 files (7 with fs-verity), 5.0 MiB read: no damage\n");
        assert_eq!(report(vec![damage("a", true, "")]).status(), ExitStatus::Success);
        let bad = report(vec![damage("a", true, ""), damage("bb", false, "no registry"), damage("c", false, "")]);
        assert_eq!(bad.status(), ExitStatus::Failure);
        let expected = "\
IMAGE        FILE                    DAMAGE      STATE
r.test/a:1   /images/layers/a.blob   is missing  repaired
r.test/bb:1  /images/layers/bb.blob  is missing  not repaired: no registry
r.test/c:1   /images/layers/c.blob   is missing  damaged

2 images, 9 files, 5.0 MiB read: 3 damaged, 1 of them repaired
";
        assert_eq!(bad.table(), expected);
        let value = serde_json::to_value(&bad).unwrap();
        assert_eq!(value["readBytes"], json!(5 << 20));
        let damaged = &value["damaged"];
        assert_eq!((&damaged[1]["repairError"], &damaged[0]["repaired"]), (&json!("no registry"), &json!(true)));
        assert_eq!(damaged[2]["repairError"], json!(null));
    }

    #[test]
    fn images_are_listed_with_sizes() {
        let image = cri::Image {
            id: format!("sha256:{}", "a".repeat(64)),
            size: 1536 << 10,
            repo_tags: vec!["r.test/a:1".into()],
            ..Default::default()
        };
        let list = vec![ImageView::from(image)];
        assert_eq!(list.table(), "IMAGE ID             SIZE     NAMES\nsha256:aaaaaaaaaaaa  1.5 MiB  r.test/a:1\n");
        assert_eq!(serde_json::to_value(&list).unwrap()[0]["sizeBytes"], json!(1536 << 10));
    }
}
