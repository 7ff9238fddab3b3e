import pytest

from tests.decoding.small import REPRESENTATIVE


@pytest.fixture(params=REPRESENTATIVE)
def policy(request):
    return REPRESENTATIVE[request.param]
