# Image for both architectures: `docker buildx bake` builds it, `docker buildx bake --push` also publishes it.
#
#     REGISTRY=registry.example/ REVISION=$(git rev-parse --short=12 HEAD) docker buildx bake --push

# Ends with a slash.
variable "REGISTRY" {
  default = ""
}

variable "VERSION" {
  default = "0.3.0-dev"
}

# Commit that `orlop --version` prints.
variable "REVISION" {
  default = "unknown"
}

group "default" {
  targets = ["orlop"]
}

target "orlop" {
  context    = "."
  dockerfile = "Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = ["${REGISTRY}orlop:${VERSION}"]
  args = {
    VERSION  = VERSION
    REVISION = REVISION
  }
}
